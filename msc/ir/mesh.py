"""The mesh: named axes with sizes. Pure data; it needs no process group and no device."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from msc.ir.errors import PlanError

KNOWN_AXES = ("pp", "dp", "tp")


@dataclass(frozen=True)
class Mesh:
    """Ranks as a grid of named axes; rank = row-major coordinate, last axis fastest.

    `Mesh.parse` accepts `"pp=2,dp=2,tp=2"`, a mapping, or a mesh. The order in which the axes
    are written is the order of the coordinates. Axes that are not named have size 1.
    """

    axes: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        names = [name for name, _ in self.axes]
        for name, size in self.axes:
            if name not in KNOWN_AXES:
                raise PlanError(
                    f"Mesh axis '{name}' is unknown. The axes are {', '.join(KNOWN_AXES)}."
                )
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise PlanError(
                    f"Mesh axis '{name}' has size {size!r}; a size is a whole number of at least 1."
                )
        if len(set(names)) != len(names):
            raise PlanError(f"Mesh axes {names} name an axis twice. Name each axis once.")

    @classmethod
    def parse(cls, spec: str | Mapping[str, int] | Mesh) -> Mesh:
        """Return the mesh that `spec` describes; raise `PlanError` if it describes none."""
        if isinstance(spec, Mesh):
            return spec
        if isinstance(spec, Mapping):
            return cls(tuple(spec.items()))
        if not isinstance(spec, str):
            raise PlanError(
                "A mesh is a string such as 'pp=2,tp=2', a dict or msc.Mesh, "
                f"not {type(spec).__name__}."
            )
        axes: list[tuple[str, int]] = []
        for part in filter(None, (piece.strip() for piece in spec.split(","))):
            name, equals, size = part.partition("=")
            if not equals or not size.strip().lstrip("-").isdigit():
                raise PlanError(
                    f"Mesh '{spec}' has the part '{part}'; write axes as name=size, "
                    "for example 'pp=2,dp=2,tp=2'."
                )
            axes.append((name.strip(), int(size)))
        return cls(tuple(axes))

    @property
    def size(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.axes)

    def axis_size(self, axis: str) -> int:
        """Size of `axis`; 1 if the mesh does not name it."""
        return dict(self.axes).get(axis, 1)

    def resized(self, axis: str, size: int) -> Mesh:
        """The same mesh with another size of `axis`, which it names."""
        return Mesh(tuple((name, size if name == axis else old) for name, old in self.axes))

    def coordinate(self, rank: int) -> dict[str, int]:
        """Coordinates of `rank` on every named axis."""
        result: dict[str, int] = {}
        for name, size in reversed(self.axes):
            rank, result[name] = divmod(rank, size)
        return {name: result[name] for name, _ in self.axes}

    def rank(self, coordinate: Mapping[str, int]) -> int:
        """Rank at `coordinate`; axes that are not given are at 0."""
        rank = 0
        for name, size in self.axes:
            rank = rank * size + coordinate.get(name, 0)
        return rank

    def peers(
        self, rank: int, axis: str, coordinates: Sequence[int] | None = None
    ) -> tuple[int, ...]:
        """Ranks that differ from `rank` only on `axis`, in order of their coordinate there.

        `coordinates` selects a part of the axis (the stages that share a tied weight).
        """
        here = self.coordinate(rank)
        chosen = range(self.axis_size(axis)) if coordinates is None else coordinates
        return tuple(self.rank({**here, axis: index}) for index in chosen)

    def __iter__(self) -> Iterator[tuple[str, int]]:
        return iter(self.axes)

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.axes) or "one rank"
