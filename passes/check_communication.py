"""Prove, over all ranks and without tensors, that communication meets and that no rank deadlocks.

    rank 0: send(to 1); wait; recv(from 1); wait     meets: 0 sends while 1 receives, and back
    rank 1: recv(from 0); wait; send(to 0); wait

Ranks are simulated on the strictest network that a program must run on: a send completes only
together with its receive, and operations on one communicator run one after the other in the order
in which a rank starts them. A communicator is a group, or one channel of one pair of ranks. Whoever
can go on under these rules stays able to, whatever others do, so one order of simulation stands for
all.

Why a few ranks stand for all. Ranks are colored (`msc.passes.rank_colors`): equal color means equal
program and, for each group and each peer that the program names, members and peers of equal colors.
Let all ranks of a color step together. Then a group's n-th operation starts on all members of a
color at once and happens when all *colors* of the group have started theirs; and the peers of a
color's ranks are the ranks of one other color. So one rank of each color stands for all. A group
whose members have one color has nobody to disagree with: equal programs start equal operations in
the same order. Such operations are left out, and a graph that has no others is not even entered.
Ranks that differ only on an axis on which neither programs nor groups depend have one color, so
they are not even listed. So the work depends on the number of colors, on the messages and on the
groups between colors, and on the sizes of the axes that decide which program a rank has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

from torch import fx

from msc.ir.mesh import KNOWN_AXES, Mesh
from msc.passes.rank_colors import color_ranks, quotient
from msc.passes.simulate_communication import Simulation


def check_communication(
    mesh: Mesh,
    rank_graph_of: Callable[[int], fx.GraphModule],
    class_of: Callable[[int], Hashable],
    axes: Collection[str] = KNOWN_AXES,
) -> None:
    """Return if all ranks' programs fit together.

    class_of: ranks of equal class have equal programs; `rank_graph_of` is asked for one of each.
    axes: those whose coordinates decide a rank's class; the work depends on the sizes of no others.
    Raises `CommunicationError` if communication does not meet or ranks deadlock, and `PlanError` if
    a program uses a group or a peer that its rank does not have.
    """
    few = Mesh(tuple((axis, size if axis in axes else 1) for axis, size in mesh))
    programs: dict[Hashable, fx.GraphModule] = {}
    for rank in range(few.size):
        whole = mesh.rank(few.coordinate(rank))
        own = class_of(whole)
        if own not in programs:
            programs[own] = rank_graph_of(whole)
    few = quotient(mesh, axes, programs.values())
    classes = [class_of(mesh.rank(few.coordinate(rank))) for rank in range(few.size)]
    colors = color_ranks(few, classes, programs, mesh)
    Simulation(colors, [programs[classes[rank]] for rank in colors.representatives]).run()
