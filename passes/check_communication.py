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
So the work depends on the number of colors, on the messages and on the groups between colors; of
the rest of the mesh only one pass over the ranks' coordinates remains.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from torch import fx

from msc.ir.mesh import Mesh
from msc.passes.rank_colors import color_ranks
from msc.passes.simulate_communication import Simulation


def check_communication(
    mesh: Mesh,
    rank_graph_of: Callable[[int], fx.GraphModule],
    class_of: Callable[[int], Hashable],
) -> None:
    """Return if all ranks' programs fit together.

    class_of: ranks of equal class have equal programs; `rank_graph_of` is asked for one of each.
    Raises `CommunicationError` if communication does not meet or ranks deadlock, and `PlanError` if
    a program uses a group or a peer that its rank does not have.
    """
    classes = [class_of(rank) for rank in range(mesh.size)]
    programs: dict[Hashable, fx.GraphModule] = {}
    for rank, own in enumerate(classes):
        if own not in programs:
            programs[own] = rank_graph_of(rank)
    colors = color_ranks(mesh, classes, programs)
    Simulation(mesh, colors, [programs[classes[rank]] for rank in colors.representatives]).run()
