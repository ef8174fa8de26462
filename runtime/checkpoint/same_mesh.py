"""What a rank takes out of the images of a snapshot that the ranks of the same mesh have made.

Every part that it holds is whole in one image, so nothing has to be planned for other ranks, as a
load from storage must, which may be onto another mesh.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import Tensor

from msc.runtime.checkpoint.image import Image, Place
from msc.runtime.checkpoint.states import StateTensors, writers, written_by


class SameMesh:
    """The images that `rank` needs, which holds the tensors `held`: its own, and of who writes
    what it does not write.

    sizes: bytes of each image, by the rank that has made it.
    """

    def __init__(self, states: StateTensors, rank: int, held: Collection[str]) -> None:
        tensors, mesh = states.tensors, states.mesh
        sources = {
            name: writer for name, writer in writers(tensors, mesh, rank).items() if name in held
        }
        self.sizes: dict[int, int] = {}
        self._places: dict[int, list[Place]] = {}
        for writer in sorted({rank, *sources.values()}):
            image = Image(written_by(tensors, mesh, writer))
            self.sizes[writer] = image.size
            self._places[writer] = [
                place for place in image.places if sources.get(place.tensor.name) == writer
            ]

    def ranges(self, writer: int) -> list[tuple[int, int]]:
        """Which bytes of its image are needed."""
        return [(place.data, place.data + place.frame.nbytes) for place in self._places[writer]]

    def fill(self, target: Mapping[str, Tensor], images: Mapping[int, Tensor]) -> None:
        """Put the parts into `target`, by name, contiguous; what pads them in it stays as it is."""
        for writer, places in self._places.items():
            for place in places:
                place.piece.of(target[place.tensor.name]).copy_(place.elements(images[writer]))
