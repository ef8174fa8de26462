"""Emit a rank graph as readable Python, one function per distinct graph.

    %mm: f32[4,8] = aten.mm(%x, %w)             def rank_program(rt, args):
    %ar = _c10d.all_reduce(%mm, 'sum', 'tp')        x, w = args
    %done = _c10d.wait_tensor(%ar)          ->      args.clear()
    return (%done,)                                 mm = aten_mm(x, w)
                                                    del x, w
                                                    ar = rt.all_reduce(mm, 'sum', 'tp', '%ar in ..')
                                                    del mm
                                                    done = rt.wait(ar)      # virtual: yield ar
                                                    del ar
                                                    return (done,)

There are two dialects. In "process", waiting is a call that blocks. In "virtual", a function that
waits is a generator: it yields what it waits for and is sent the result; a fused collective, which
is complete when it returns, is a generator of `rt`'s own. All else is the same, and a graph that
waits for nothing is a plain function in both.

Arguments travel in a list that the callee empties, so that a value ends where it is last read and
not where the outermost caller returns. `rt` is the executor's side of the program: a method for
each collective (`msc.ir.communication.COLLECTIVES`) and each action (`msc.ir.actions`).
"""

from __future__ import annotations

import itertools
import linecache
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx
from torch.utils import _pytree as pytree

from msc.codegen.fast_calls import function_of
from msc.codegen.in_place import in_place_calls
from msc.codegen.kernel_calls.call import KernelCall
from msc.codegen.kernel_calls.choice import KernelChoice
from msc.codegen.kernel_calls.fused_collectives import FusedCall
from msc.codegen.lifetime import last_uses, reuses_total, unpacked
from msc.codegen.names import Namespace, Renderer, op_name
from msc.codegen.pieces import cut_at_communication
from msc.ir import actions
from msc.ir.communication import (
    FUSED,
    STARTS,
    WAITS,
    check_form,
    graphs_below,
    is_communication,
    subgraph,
)
from msc.ir.errors import VerifyError
from msc.ir.values import describe

Dialect = Literal["process", "virtual"]
Compile = Callable[[fx.GraphModule], Callable[..., Any]]

_numbers = itertools.count(1)
_WIDTH = 100


@dataclass(frozen=True)
class Emitted:
    """Generated source, the names that it uses, and the name of the rank's program in it."""

    source: str
    namespace: dict[str, Any]
    entry: str

    @property
    def program(self) -> Callable[..., Any]:
        """`program(rt, args)`: `args` is a list with one value per placeholder; it is emptied."""
        function: Callable[..., Any] = self.namespace[self.entry]
        return function


def emit(
    rank_graph: fx.GraphModule,
    dialect: Dialect,
    compile_chunk: Compile | None = None,
    choice: KernelChoice | None = None,
) -> Emitted:
    """Emit one rank graph; see `Emitter` for several that share graphs.

    `compile_chunk` turns a graph that neither communicates nor acts into a callable on its
    placeholders' values. `choice` says which calls run in Triton kernels; without it, none.
    """
    return Emitter(dialect, compile_chunk, choice).emit(rank_graph)


class Emitter:
    """Emits rank graphs into one namespace; a graph that several of them call is emitted once."""

    def __init__(
        self,
        dialect: Dialect,
        compile_chunk: Compile | None = None,
        choice: KernelChoice | None = None,
    ) -> None:
        self.dialect = dialect
        self.choice = choice
        self.namespace = Namespace()
        self._compile_chunk = compile_chunk
        self._sources: list[str] = []
        self._functions: dict[int, str] = {}
        self._waits: dict[int, bool] = {}
        self._kept: list[fx.GraphModule] = []  # ids stay theirs

    def emit(self, rank_graph: fx.GraphModule, hint: str = "rank_program") -> Emitted:
        """Emit `rank_graph` and what it calls; the result's source is all that was emitted."""
        for graph in graphs_below(rank_graph):
            for node in graph.graph.nodes:
                check_form(node)
        entry = self._function(rank_graph, hint)
        return Emitted("\n\n".join(self._sources), self.namespace.values, entry)

    def waits(self, module: fx.GraphModule) -> bool:
        """Whether running `module` may wait for other ranks."""
        known = self._waits.get(id(module))
        if known is None:
            known = self._waits[id(module)] = any(
                (node.op == "call_function" and (node.target in WAITS or node.target in FUSED))
                or (node.op == "call_module" and self.waits(subgraph(module, node)))
                for node in module.graph.nodes
            )
            self._kept.append(module)
        return known

    def chosen(self, node: fx.Node) -> KernelCall | None:
        """The kernels that compute a call, if there are any."""
        return None if self.choice is None else self.choice.of(node)

    def fused(self, node: fx.Node) -> FusedCall | None:
        """The kernels of a fused collective, if there are any."""
        return None if self.choice is None else self.choice.fused(node)

    def _function(self, module: fx.GraphModule, hint: str) -> str:
        known = self._functions.get(id(module))
        if known is not None:
            return known
        self._kept.append(module)
        body = module
        if self._compile_chunk is not None and _is_leaf(module):
            if _is_pure(module) and not any(map(self.chosen, module.graph.nodes)):
                return self._compiled(module, hint, self._compile_chunk)
            body = cut_at_communication(module, self.chosen)
        callees = {
            node.target: self._function(subgraph(body, node), node.target.rpartition(".")[2])
            for node in body.graph.nodes
            if node.op == "call_module"
        }
        name = self.namespace.reserve(hint)
        self._functions[id(module)] = name
        source = _Function(self, body, name, callees).source()
        self._define(name, source)
        return name

    def _compiled(self, module: fx.GraphModule, hint: str, compile_chunk: Compile) -> str:
        compiled = self.namespace.bind(f"compiled_{hint}", compile_chunk(module))
        name = self.namespace.reserve(hint)
        self._functions[id(module)] = name
        lines = ["values = tuple(args)", "args.clear()", f"return {compiled}(*values)"]
        body = "".join(f"    {line}\n" for line in lines)
        self._define(name, f"def {name}(rt, args):\n{body}")
        return name

    def _define(self, name: str, source: str) -> None:
        filename = f"<msc {self.dialect} {next(_numbers)}: {name}>"
        # So that tracebacks show generated lines. `None` keeps the entry when files are checked.
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)
        exec(compile(source, filename, "exec"), self.namespace.values)
        self._sources.append(source)


def _is_leaf(module: fx.GraphModule) -> bool:
    return all(node.op != "call_module" for node in module.graph.nodes)


def _is_pure(module: fx.GraphModule) -> bool:
    return not any(
        is_communication(node) or node.target in actions.ACTIONS for node in module.graph.nodes
    )


class _Function:
    """The source of one graph."""

    def __init__(
        self, emitter: Emitter, module: fx.GraphModule, name: str, callees: dict[Any, str]
    ) -> None:
        self._emitter = emitter
        self._module = module
        self._name = name
        self._callees = callees
        self._namespace = emitter.namespace
        self._names = self._namespace.local_names(module.graph.nodes)
        self._render = Renderer(self._names, self._namespace)
        self._items = unpacked(module)
        self._folded = {item for items in self._items.values() for item in items if item}
        self._ends = last_uses(module, self._items)
        self._in_place = in_place_calls(module)
        self._lines: list[str] = []

    def source(self) -> str:
        """The function's text."""
        self._header()
        for node in self._module.graph.nodes:
            if node.op not in ("placeholder", "output") and node not in self._folded:
                self._statement(node)
        self._write(f"return {self._render.value(self._module.graph.output_node().args[0])}")
        body = "\n".join(f"    {line}" for line in self._lines)
        return f"def {self._name}(rt, args):\n{body}\n"

    def _header(self) -> None:
        nodes = self._module.graph.find_nodes(op="placeholder")
        if nodes:
            names = [self._names[node] for node in nodes]
            self._write(f"{_listing(names)} = args")
            self._write("args.clear()")
        self._delete([node for node in nodes if node in self._ends.get(node, ())])

    def _statement(self, node: fx.Node) -> None:
        ends = self._ends.get(node, [])
        if node.op == "call_module":
            call = self._call_graph(node, ends)
            operands = set(node.all_input_nodes)
            ends = [other for other in ends if other not in operands]
        else:
            call = self._expression(node)
        target = self._target(node)
        self._write(f"{target} = {call}{self._comment(node)}")
        self._delete(ends, blank="_" in target.split(", "))

    def _target(self, node: fx.Node) -> str:
        items = self._items.get(node)
        if items is None:
            return self._names[node]
        names = ["_" if item is None else self._names[item] for item in items]
        return f"{names[0]}," if len(names) == 1 else ", ".join(names)

    def _call_graph(self, node: fx.Node, ends: list[fx.Node]) -> str:
        callee = self._callees[node.target]
        values = [self._render.value(arg) for arg in node.args]
        waits = self._emitter.dialect == "virtual" and self._emitter.waits(
            subgraph(self._module, node)
        )
        before = "yield from " if waits else ""
        operands = set(node.all_input_nodes)
        given = [other for other in ends if other in operands]
        if not given:
            return f"{before}{callee}(rt, {_listing(values, '[]')})"
        self._write(f"box = {_listing(values, '[]')}")
        self._delete(given)
        return f"{before}{callee}(rt, box)"

    def _expression(self, node: fx.Node) -> str:
        if node.op == "get_attr":
            return self._constant(node)
        if node.op == "call_method":
            first, *rest = node.args
            return f"{self._render.value(first)}.{node.target}({self._arguments(node, rest)})"
        if node.op != "call_function" or not callable(node.target):
            raise VerifyError(f"%{node.name} is a {node.op} node, which no executor can run.")
        if node.target in WAITS:
            token = self._render.value(node.args[0])
            return f"yield {token}" if self._emitter.dialect == "virtual" else f"rt.wait({token})"
        if node.target in FUSED:
            before = "yield from " if self._emitter.dialect == "virtual" else ""
            arguments = self._arguments(node)
            kernel = self._kernel_of(node)
            return f"{before}rt.{FUSED[node.target]}({arguments}, {self._site(node)!r}{kernel})"
        if node.target in STARTS:
            return f"rt.{STARTS[node.target]}({self._arguments(node)}, {self._site(node)!r})"
        if node.target in actions.ACTIONS:
            return f"rt.{self._action(node)}({self._arguments(node)}{self._kernel_of(node)})"
        if node.target is operator.getitem:
            return f"{self._render.value(node.args[0])}[{self._render.value(node.args[1])}]"
        if node in self._in_place:
            return self._overwriting(node)
        target: Any = node.target
        call = self._emitter.chosen(node)
        function = self._namespace.bind(op_name(call or target), call or function_of(target))
        return f"{function}({self._arguments(node)})"

    def _overwriting(self, node: fx.Node) -> str:
        function, index = self._in_place[node]
        call = self._emitter.chosen(node)
        if call is not None:
            function = call.overwriting(function)
        name = self._namespace.bind(function.__name__, function)
        others = (*node.args[:index], *node.args[index + 1 :])
        return f"{name}({self._arguments(node, (node.args[index], *others))})"

    def _action(self, node: fx.Node) -> str:
        name: str = node.target.__name__  # type: ignore[union-attr]
        in_place = node.target is actions.accumulate and node.args[0] is not None
        return "accumulate_" if in_place and reuses_total(node) else name

    def _kernel_of(self, node: fx.Node) -> str:
        """The kernels that an action or a fused collective is to take, as its last argument."""
        chosen = self._emitter.fused if node.target in FUSED else self._emitter.chosen
        call: Any = chosen(node)
        if call is None:
            return ""
        return f", kernel={self._namespace.bind(op_name(call), call)}"

    def _constant(self, node: fx.Node) -> str:
        value: Any = self._module
        for part in str(node.target).split("."):
            value = getattr(value, part)
        if isinstance(value, fx.GraphModule):
            raise VerifyError(f"%{node.name} passes the graph '{node.target}' as a value; call it.")
        return self._namespace.bind(f"{self._name}_{node.target}", value)

    def _arguments(self, node: fx.Node, args: Any = None) -> str:
        return self._render.arguments(node.args if args is None else args, dict(node.kwargs))

    def _site(self, node: fx.Node) -> str:
        path = node.meta.get("module_path")
        return f"%{node.name} in {self._name}" + (f" ({path})" if path else "")

    def _comment(self, node: fx.Node) -> str:
        value = node.meta.get("val")
        types = describe(value) if pytree.tree_leaves(value) else ""
        parts = [part for part in (types, node.meta.get("module_path")) if part]
        return f"  # {' '.join(parts)}" if parts else ""

    def _delete(self, nodes: list[fx.Node], blank: bool = False) -> None:
        names = [self._names[node] for node in nodes] + (["_"] if blank else [])
        if names:
            self._write(f"del {_listing(names).removesuffix(',')}")

    def _write(self, text: str) -> None:
        self._lines.append(text)


def _listing(names: list[str], brackets: str = "") -> str:
    """Comma-separated; over several lines in brackets where one is too short."""
    text = ", ".join(names)
    if len(text) < _WIDTH:
        if brackets:
            return f"{brackets[0]}{text}{brackets[1]}"
        return f"{text}," if len(names) == 1 else text
    opening, closing = brackets[:1] or "(", brackets[1:] or ")"
    inner = "".join(f"        {name},\n" for name in names)
    return f"{opening}\n{inner}    {closing}"
