"""Runs the programs of several virtual ranks at once, as a GPU might, and finds their deadlocks.

Every program is a coroutine. Whenever one synchronizes (an atomic, a wait of a copy engine), a
seeded scheduler draws who runs next, so that a failing seed replays exactly. Not more programs of a
rank are live than fit on its device; the rest start in order, each when another has ended. Where
every live program polls and nothing that they poll can change any more, that is a deadlock, and it
is reported with the names of those who wait.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from greenlet import getcurrent

from msc.codegen.kernels.description import Kernel
from msc.codegen.kernels.launch import bind, function
from msc.codegen.kernels.numerics import exact_bfloat16
from msc.codegen.kernels.patching import replaced
from msc.testing.interpreter.assembly import PROXY_FENCE, Results, fences
from msc.testing.interpreter.copy_engine import CopyEngine
from msc.testing.interpreter.memory import Memory
from msc.testing.interpreter.tasks import Launch, Task

STEP_LIMIT = 2_000_000


class Deadlock(RuntimeError):
    """No program can go on; the message names those that wait."""


@dataclass
class _Rank:
    launches: list[Launch] = field(default_factory=list)
    live: int = 0


class Executor:
    """Ranks `0 .. ranks - 1`, each with a stream of kernels and any number of copy engines.

    seed: draws the schedule. resident: programs of one rank that may be live at once; None for all.
    Use one executor for one `run`.
    """

    def __init__(self, seed: int, ranks: int, resident: int | None = None) -> None:
        from triton.runtime import interpreter

        self._rng = random.Random(seed)
        self._resident = resident
        # Some mistakes show only where one program lags far behind all others, which tasks that are
        # drawn alike never do (Burckhardt et al., "A randomized scheduler with probabilistic
        # guarantees of finding bugs", ASPLOS 2010): on most schedules some run last.
        self._slow_share = self._rng.choice([0.0, 0.1, 0.3])
        self._ranks = [_Rank() for _ in range(ranks)]
        self._engines: list[Task] = []
        self._functions: list[Any] = []
        self._live: list[Task] = []
        self._draining: list[Task] = []  # ended, but not all that they stored is visible yet
        self._launch_of: dict[Task, Launch] = {}
        self._bulk = False  # inside a load or store by a tensor descriptor
        self._builder = interpreter.InterpreterBuilder
        self._handle = interpreter.TensorHandle
        self._hooks: dict[str, Callable[..., Any]] = {
            "create_masked_load": self._hook(self._on_load, "create_masked_load"),
            "create_masked_store": self._hook(self._on_store, "create_masked_store"),
            "create_atomic_rmw": self._hook(self._on_atomic, "create_atomic_rmw"),
            "create_descriptor_load": self._hook_bulk("create_descriptor_load"),
            "create_descriptor_store": self._hook_bulk("create_descriptor_store"),
            "create_inline_asm": self._hook(self._on_asm, "create_inline_asm"),
        }
        self._original = {name: getattr(self._builder, name) for name in self._hooks}
        self._memory = Memory(self._rng, self._read, self._write)

    def launch(self, rank: int, kernel: Kernel, values: Mapping[str, Any]) -> Launch:
        """Puts a kernel at the end of a rank's stream."""
        from triton.runtime import interpreter

        entry = function(kernel)
        body = entry.rewrite()
        self._functions.append(entry.fn)
        named = inspect.getcallargs(entry.fn, *bind(kernel, values))

        def run() -> None:
            body(**{name: interpreter._implicit_cvt(value) for name, value in named.items()})

        grid = (*kernel.grid, 1, 1)[:3]
        tasks: list[Task] = []
        for index in np.ndindex(*grid[::-1]):  # the first dim of a grid varies fastest
            name = f"rank {rank} {kernel.entry} program {len(tasks)}"
            task = Task(name, rank, run)
            task.grid, task.index = grid, index[::-1]
            tasks.append(task)
        return self._append(rank, tasks)

    def copies(self, rank: int, name: str, work: Callable[[CopyEngine], None]) -> Launch:
        """Puts copies, waits and signals at the end of a rank's stream, between its kernels."""
        return self._append(rank, [self._copy_task(rank, name, work)])

    def _copy_task(self, rank: int, name: str, work: Callable[[CopyEngine], None]) -> Task:
        def run() -> None:
            work(CopyEngine(task, self._memory, self._rng, self._switch, self._poll))

        task = Task(f"rank {rank} {name}", rank, run)
        return task

    def _append(self, rank: int, tasks: list[Task]) -> Launch:
        for task in tasks:
            task.slow = self._rng.random() < self._slow_share
        launch = Launch(rank, tasks)
        self._ranks[rank].launches.append(launch)
        return launch

    def engine(self, rank: int, name: str, work: Callable[[CopyEngine], None]) -> None:
        """Adds a second stream of copies, waits and signals, which runs beside the kernels."""
        self._engines.append(self._copy_task(rank, name, work))

    def run(self) -> None:
        """Until everything has ended. Raises Deadlock, or what a program raised."""
        from triton import language
        from triton.runtime import interpreter

        self._hub = getcurrent()
        with ExitStack() as stack:
            stack.enter_context(exact_bfloat16())
            stack.enter_context(replaced(self._builder, self._hooks))
            # the language is patched once for all programs, not at each call of a helper
            call = {"__call__": lambda helper, *args, **kwargs: helper.rewrite()(*args, **kwargs)}
            stack.enter_context(replaced(interpreter.InterpretedFunction, call))
            for patched in dict.fromkeys([*self._functions, language.standard.zeros.fn]):
                stack.callback(interpreter._patch_lang(patched).restore)
            try:
                self._live = list(self._engines)
                self._loop()
            finally:
                for task in self._live:
                    if task and not task.dead:
                        task.throw()

    def _switch(self) -> None:
        """Called by a task: lets others run."""
        self._hub.switch()

    def _poll(self, task: Task) -> None:
        """Called by a task that found nothing new: it need not run before memory changes."""
        task.polled_at = self._memory.version
        self._switch()

    def _loop(self) -> None:
        from triton.runtime import interpreter

        for _ in range(STEP_LIMIT):
            self._start_programs()
            if not self._live and not self._draining:
                return
            ready = [task for task in self._live if task.polled_at != self._memory.version]
            ready += self._draining
            if not ready:
                ready = [task for task in self._live if task.view.pending]
                if not ready:
                    raise Deadlock(self._stuck())
                self._memory.drain(self._rng.choice(ready).view)
                continue
            task = self._rng.choice([task for task in ready if not task.slow] or ready)
            if task.dead:
                for _ in range(self._rng.randint(1, len(task.view.pending))):
                    self._memory.drain(task.view)
                self._finish_if_drained(task)
                continue
            if task.grid is not None:
                interpreter.interpreter_builder.grid_dim = task.grid
                interpreter.interpreter_builder.grid_idx = task.index
            task.switch()
            if task.dead:
                self._end(task)
        raise Deadlock(f"no end after {STEP_LIMIT} steps: {self._stuck()}")

    def _start_programs(self) -> None:
        for rank in self._ranks:
            while rank.launches and rank.launches[0].done:
                rank.launches.pop(0)
            if not rank.launches:
                continue
            launch = rank.launches[0]
            launch.started = True
            while launch.waiting and (self._resident is None or rank.live < self._resident):
                task = launch.waiting.pop(0)
                self._memory.begin(task.view)
                self._launch_of[task] = launch
                self._live.append(task)
                launch.running += 1
                rank.live += 1

    def _end(self, task: Task) -> None:
        self._live.remove(task)
        if task in self._launch_of:
            self._ranks[task.rank].live -= 1
        self._draining.append(task)
        self._finish_if_drained(task)

    def _finish_if_drained(self, task: Task) -> None:
        """A launch has ended when all that its programs stored is visible."""
        if task.view.pending:
            return
        self._draining.remove(task)
        if task in self._launch_of:
            self._launch_of[task].running -= 1
            self._memory.version += 1  # copy engines may wait for the end of a launch

    def _stuck(self) -> str:
        behind = sum(len(launch.waiting) for rank in self._ranks for launch in rank.launches)
        names = ", ".join(sorted(task.name for task in self._live)[:8])
        more = f" and {len(self._live) - 8} more" if len(self._live) > 8 else ""
        return f"{len(self._live)} tasks wait, {behind} programs have not started: {names}{more}"

    # What programs do, instead of what the interpreter would do.

    def _hook(self, handler: Callable[..., Any], name: str) -> Callable[..., Any]:
        def hooked(builder: Any, *args: Any, **kwargs: Any) -> Any:
            task = getcurrent()
            if not isinstance(task, Task):
                return self._original[name](builder, *args, **kwargs)
            if handler != self._on_atomic:
                task.polled_at = -1  # a loop that only polls neither loads nor stores
            return handler(task, builder, *args, **kwargs)

        return hooked

    def _hook_bulk(self, name: str) -> Callable[..., Any]:
        def hooked(builder: Any, *args: Any) -> Any:
            self._bulk = True
            try:
                return self._original[name](builder, *args)
            finally:
                self._bulk = False

        return hooked

    def _on_load(
        self,
        task: Task,
        builder: Any,
        pointers: Any,
        mask: Any,
        other: Any,
        *rest: Any,
        **named: Any,
    ) -> Any:
        mask = self._as_handle(mask)
        shape = pointers.data.shape
        inside = np.broadcast_to(mask.data, shape)

        def fresh() -> Any:
            return self._original["create_masked_load"](
                builder, pointers, mask, other, None, None, False
            ).data

        data = self._memory.load(task.view, pointers.data, inside, fresh, self._bulk)
        return self._handle(data, pointers.get_element_ty())

    def _on_store(
        self, task: Task, builder: Any, pointers: Any, value: Any, mask: Any, *rest: Any
    ) -> None:
        mask = self._as_handle(mask)
        self._memory.store(task.view, pointers.data, value.data, mask.data, self._bulk)

    def _on_atomic(
        self,
        task: Task,
        builder: Any,
        op: Any,
        pointer: Any,
        value: Any,
        mask: Any,
        sem: Any,
        scope: Any,
    ) -> Any:
        from triton.runtime import interpreter

        order = interpreter._ir.MEM_SEMANTIC
        polls = not value.data.any()
        asked = int(pointer.data.flat[0])
        if not polls or asked != task.polled:
            task.polled_at = -1  # of another flag it does not know yet
        task.polled = asked
        if sem in (order.RELEASE, order.ACQUIRE_RELEASE):
            self._memory.release(task.view)
        self._switch()  # others run between the stores and the signal
        for other in self._live:
            if other is not task or sem == order.RELAXED:
                self._memory.drain_by_chance(other.view)
        result = self._original["create_atomic_rmw"](builder, op, pointer, value, mask, sem, scope)
        if polls:  # it adds nothing: the result decides whether the program asks again
            task.polled_at = self._memory.version
        else:
            self._memory.version += 1
        if sem in (order.ACQUIRE, order.ACQUIRE_RELEASE):
            self._memory.acquire(task.view)
        return result

    def _on_asm(
        self, task: Task, builder: Any, text: str, constraints: str, values: list[Any], *rest: Any
    ) -> Any:
        for fence in fences(text):
            if fence == PROXY_FENCE:
                self._memory.fence_bulk(task.view)
            else:
                self._memory.finish_bulk(task.view)
        return Results(self._handle(values[0].data.copy(), values[0].dtype))

    def _as_handle(self, mask: Any) -> Any:
        from triton import language

        return self._handle(mask, language.int1) if isinstance(mask, np.ndarray) else mask

    def _read(self, addresses: Any, dtype: np.dtype[Any]) -> Any:
        from triton.runtime import interpreter

        everywhere = np.ones(addresses.shape, dtype=bool)
        nothing = np.zeros(addresses.shape, dtype=dtype)
        return interpreter._interpreter.load(addresses, everywhere, nothing, dtype)

    def _write(self, addresses: Any, values: Any) -> None:
        from triton.runtime import interpreter

        everywhere = np.ones(addresses.shape, dtype=bool)
        interpreter._interpreter.store(addresses, values, everywhere)
