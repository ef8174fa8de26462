"""The network of the virtual executor: matches what ranks start, and says who waits for whom.

Collectives on a group meet by the order in which each member starts them; messages on a channel
from one rank to another meet in order too. Starting never blocks.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from msc.ir.errors import CommunicationError
from msc.ir.torch_private import version
from msc.ir.values import describe
from msc.runtime import collectives


@dataclass(eq=False)
class Token:
    """One communication that one rank has started."""

    rank: int
    text: str  # "all_gather f32[4] on 'tp'"
    site: str
    inputs: tuple[Tensor, ...]
    waits_for: str = ""
    done: bool = False
    result: Any = None
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.versions = tuple(version(value) for value in self.inputs)

    def complete(self, result: Any) -> None:
        """Note the result. The inputs stay, as they must be whole until the wait."""
        self.done, self.result = True, result

    def check_untouched(self) -> None:
        """Raise if an input was written to after the start: a real network may still read it."""
        if tuple(version(value) for value in self.inputs) != self.versions:
            raise CommunicationError(
                f"rank {self.rank} wrote to the input of {self} while it was in flight. "
                "What is sent may only be reused after the wait."
            )

    def __str__(self) -> str:
        return f"{self.text} at {self.site}"


@dataclass(eq=False)
class _Collective:
    """One collective of one group: who has started it so far."""

    kind: str
    group: str
    number: int
    members: tuple[int, ...]
    signature: tuple[Any, ...]
    together: Callable[[Sequence[Any]], Sequence[Any]] | None = None
    started: dict[int, tuple[Token, tuple[Any, ...]]] = field(default_factory=dict)

    def missing(self) -> list[int]:
        return [rank for rank in self.members if rank not in self.started]


@dataclass(eq=False)
class _Message:
    token: Token
    values: tuple[Tensor, ...]


class Network:
    """Matches what ranks start. With `rendezvous` a send completes when its receive is posted."""

    def __init__(self, rendezvous: bool) -> None:
        self._rendezvous = rendezvous
        self._counts: Counter[tuple[int, str]] = Counter()
        self._open: dict[tuple[str, tuple[int, ...], int], _Collective] = {}
        self._sent: defaultdict[tuple[str, int, int], deque[_Message]] = defaultdict(deque)
        self._posted: defaultdict[tuple[str, int, int], deque[Token]] = defaultdict(deque)

    def collective(
        self,
        kind: str,
        value: Tensor,
        arguments: tuple[Any, ...],
        group: str,
        members: tuple[int, ...],
        rank: int,
        site: str,
        together: Callable[[Sequence[Any]], Sequence[Any]] | None = None,
    ) -> Token:
        """Start a collective; it happens when the last member starts it.

        together: makes the results of all members of their arguments, for a `kind` that is none of
        `msc.runtime.collectives`; of those arguments members may have different ones.
        """
        number = self._counts[rank, group]
        self._counts[rank, group] += 1
        stated = () if together is not None else arguments
        described = ", ".join([describe(value), *map(str, stated)])
        token = Token(rank, f"{kind}({described}) on '{group}'", site, (value,))
        shape = tuple(value.shape[1:]) if kind == "all_to_all" else tuple(value.shape)
        signature = (kind, shape, value.dtype, () if kind == "all_to_all" else stated)
        _check_divides(kind, value, arguments, members, token)
        key = (group, members, number)
        made = _Collective(kind, group, number, members, signature, together)
        entry = self._open.setdefault(key, made)
        if entry.signature != signature:
            first, _ = next(iter(entry.started.values()))
            raise _mismatch(entry, first, token)
        entry.started[rank] = (token, arguments)
        token.waits_for = f"number {number} of group {members}"
        if not entry.missing():
            del self._open[key]
            _fire(entry)
        return token

    def send(
        self, values: Sequence[Tensor], channel: str, source: int, destination: int, site: str
    ) -> Token:
        """Start a send; without rendezvous it is complete at once."""
        text = f"send {describe(tuple(values))} to rank {destination} on channel '{channel}'"
        token = Token(source, text, site, tuple(values))
        key = (channel, source, destination)
        self._sent[key].append(_Message(token, tuple(value.clone() for value in values)))
        if not self._rendezvous:
            token.complete(None)
        token.waits_for = f"rank {destination} to receive"
        self._match(key)
        return token

    def recv(
        self, types: tuple[tuple[Any, Any], ...], channel: str, source: int, rank: int, site: str
    ) -> Token:
        """Post a receive of tensors of the given (shape, dtype)s."""
        token = Token(rank, f"recv from rank {source} on channel '{channel}'", site, ())
        token.waits_for = f"rank {source} to send"
        token.result = types  # until it is complete
        key = (channel, source, rank)
        self._posted[key].append(token)
        self._match(key)
        return token

    def _match(self, key: tuple[str, int, int]) -> None:
        while self._sent[key] and self._posted[key]:
            message, receive = self._sent[key].popleft(), self._posted[key].popleft()
            types = tuple((tuple(value.shape), value.dtype) for value in message.values)
            if types != receive.result:
                wanted = ", ".join(f"{dtype} {list(shape)}" for shape, dtype in receive.result)
                raise CommunicationError(
                    f"ranks disagree on a message of channel '{key[0]}':\n"
                    f"  rank {key[1]}: {message.token}\n"
                    f"  rank {key[2]}: {receive}, which expects ({wanted})"
                )
            message.token.complete(None)
            receive.complete(message.values)

    def explain(self, token: Token) -> str:
        """What `token` still waits for and who is missing."""
        for entry in self._open.values():
            if any(own is token for own, _ in entry.started.values()):
                missing = ", ".join(f"rank {rank}" for rank in entry.missing())
                return f"collective {entry.number} of group {entry.members} lacks {missing}"
        return f"it waits for {token.waits_for}"

    def left_over(self) -> list[str]:
        """What was started and can never complete once all ranks have ended, one line each."""
        lines: list[str] = []
        for entry in self._open.values():
            missing = ", ".join(f"rank {rank}" for rank in entry.missing())
            for rank, (token, _) in sorted(entry.started.items()):
                lines.append(f"rank {rank}: {token} was never joined by {missing}")
        for messages in self._sent.values():
            lines += [f"rank {m.token.rank}: {m.token} was never received" for m in messages]
        for tokens in self._posted.values():
            lines += [f"rank {token.rank}: {token} was never sent" for token in tokens]
        return lines


def _fire(entry: _Collective) -> None:
    tokens = [entry.started[rank][0] for rank in entry.members]
    for token in tokens:
        token.check_untouched()
    arguments = [entry.started[rank][1] for rank in entry.members]
    if entry.kind == "all_to_all":
        _check_splits(entry, arguments)
    if entry.together is not None:
        results = entry.together(arguments)
    else:
        inputs = [token.inputs[0] for token in tokens]
        results = collectives.run(entry.kind, inputs, arguments)
    for token, result in zip(tokens, results, strict=True):
        token.complete(result)


def _check_splits(entry: _Collective, arguments: Sequence[tuple[Any, ...]]) -> None:
    for sender, (_, sent) in enumerate(arguments):
        for receiver, (received, _) in enumerate(arguments):
            if sent[receiver] != received[sender]:
                ranks = entry.members[sender], entry.members[receiver]
                raise CommunicationError(
                    f"ranks disagree on collective {entry.number} of group '{entry.group}' "
                    f"{entry.members}: rank {ranks[0]} sends {sent[receiver]} rows to rank "
                    f"{ranks[1]}, which expects {received[sender]}"
                )


def _check_divides(
    kind: str, value: Tensor, arguments: tuple[Any, ...], members: tuple[int, ...], token: Token
) -> None:
    size = len(members)
    claimed = {"all_gather": 0, "reduce_scatter": 1}.get(kind)
    if claimed is not None and arguments[claimed] != size:
        raise CommunicationError(
            f"rank {token.rank}: {token} counts {arguments[claimed]} members of {members}"
        )
    if kind == "reduce_scatter" and (value.dim() == 0 or value.shape[0] % size):
        raise CommunicationError(
            f"rank {token.rank}: {token} cannot split dim 0 over the {size} members {members}"
        )
    if kind in ("reduce_scatter", "all_reduce") and arguments[0] not in collectives.REDUCTIONS:
        known = ", ".join(collectives.REDUCTIONS)
        raise CommunicationError(f"rank {token.rank}: {token}: the reductions are {known}")


def _mismatch(entry: _Collective, first: Token, second: Token) -> CommunicationError:
    return CommunicationError(
        f"ranks disagree on collective {entry.number} of group '{entry.group}' {entry.members}:\n"
        f"  rank {first.rank}: {first}\n"
        f"  rank {second.rank}: {second}"
    )
