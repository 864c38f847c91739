"""Defects of the kind that the checker is for, planted in the product's source."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gpuscore.backends.torch import graph_launcher, linear, queues
from support.streams.worlds import Life

SEEDS = (0, 3, 6, 9)  # worlds without faults
THREE_IN_FLIGHT = (*SEEDS, 12, 15)  # in some, so that the launcher allocates buffers
OUT_OF_MEMORY = (7, 25, 43, 61, 79)  # worlds where memory runs out, and nothing else happens
RETURN = "                self._free.append(buffers)\n"
GIVE = "            self._free.append(buffers)\n"
WAIT = "            wait()\n"
CURRENT = "torch.cuda.current_stream(self.device)"
UPLOADS = "        with torch.cuda.stream(self._uploads):\n"
OTHER = "        with torch.cuda.stream(torch.cuda.Stream(self.device)):\n"
PINNED = (
    "    def host(self, count: int, dtype: torch.dtype) -> Tensor:\n"
    "        return torch.empty(count, dtype=dtype, pin_memory=True)\n"
)
REPLAY = "            replay()\n"
INT8_WITHOUT_GRAPHS = 18
QUANTIZE = "                q, scale = quantize_rows(x, linear.weight.dtype, impl=self._impl)\n"
DOWNLOAD = "        host.copy_(device, non_blocking=True)\n"


@dataclass(frozen=True, slots=True)
class Plant:
    """A defect: source text to replace, once each, and the kind of finding that it makes."""

    name: str
    module: ModuleType
    changes: tuple[tuple[str, str], ...]
    kind: str
    seeds: tuple[int, ...] = SEEDS
    group: int = 0  # whose limits the backend has


PLANTS = (
    Plant(
        "a dropped wait_stream",
        queues,
        ((f"        {CURRENT}.wait_stream(self._uploads)\n", ""),),
        "unordered on two streams",
    ),
    Plant(
        "a buffer handed back early",
        graph_launcher,
        ((RETURN, "                pass\n"), (WAIT, GIVE + WAIT)),
        "handed back while in use",
    ),
    Plant(
        "a missing event",
        queues,
        ((f"        done.record({CURRENT})\n", ""),),
        "read before the copy to it has ended",
    ),
    Plant(
        "an upload on the wrong stream",
        queues,
        ((UPLOADS, OTHER),),
        "unordered on two streams",
    ),
    Plant(
        "reuse of pinned memory",
        queues,
        ((PINNED, f"    @__import__('functools').cache\n{PINNED}"),),
        "written while a copy from it is in flight",
    ),
    Plant(
        "a read before finish",
        graph_launcher,
        ((WAIT, ""), (RETURN, "    " + WAIT + RETURN)),
        "read before the copy to it has ended",
    ),
    Plant(
        "an upload into memory that queued work may still use",
        queues,
        ((f"        self._uploads.wait_stream({CURRENT})\n", ""),),
        "used before its stream may use it",
        THREE_IN_FLIGHT,
        group=1,
    ),
    Plant(
        "an answer that is not copied before its buffer is handed back",
        graph_launcher,
        ((".numpy().copy()", ".numpy()"),),
        "used after it was handed back",
    ),
    Plant(
        "a download on the stream of the uploads",
        queues,
        ((DOWNLOAD, UPLOADS + "    " + DOWNLOAD),),
        "unordered on two streams",
    ),
    Plant(
        "a graph on a stream of its own",
        graph_launcher,
        ((REPLAY, f"            with torch.cuda.stream(torch.cuda.Stream()):\n    {REPLAY}"),),
        "unordered on two streams",
    ),
    Plant(
        "a failed batch's buffer handed back at once",
        graph_launcher,
        (("        self.queue.wait()\n", ""),),
        "handed back while in use",
        OUT_OF_MEMORY,
    ),
    Plant(
        "rows quantised on a stream of their own",
        linear,
        (
            (
                QUANTIZE,
                f"                with torch.cuda.stream(torch.cuda.Stream()):\n    {QUANTIZE}",
            ),
        ),
        "unordered on two streams",
        group=INT8_WITHOUT_GRAPHS,
    ),
)


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    """Run the changed source in the module, and let every importer see what it defines."""
    module = plant.module
    path = Path(str(module.__file__))
    source = path.read_text()
    for old, new in plant.changes:
        assert source.count(old) == 1, f"{path.name} does not hold once {old!r}"
        source = source.replace(old, new)
    with ExitStack() as restored:
        before = dict(vars(module))
        restored.callback(vars(module).update, before)
        exec(compile(source, path, "exec"), vars(module))  # noqa: S102  (the point of it)
        for name, own in list(vars(module).items()):
            if getattr(own, "__module__", None) == module.__name__ and name in before:
                _rebind(restored, name, before[name], own)
        yield


def _rebind(restored: ExitStack, name: str, before: Any, now: Any) -> None:
    for other in list(sys.modules.values()):
        ours = getattr(other, "__name__", "").startswith(("gpuscore.", "support.streams"))
        if ours and vars(other).get(name) is before:
            restored.callback(setattr, other, name, before)
            setattr(other, name, now)


def is_found(plant: Plant, directory: Path) -> bool:
    """Tell whether the checker makes the plant's finding, at the start or in a few worlds."""
    with planted(plant):
        life = Life(directory, plant.group)
        with life.started() as real:
            for seed in plant.seeds:
                if plant.kind in life.kinds():
                    break
                life.run(seed, real)
    return plant.kind in life.kinds()
