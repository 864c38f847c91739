"""Runs the sections of bench/gpu.py that the state does not have yet; started by bench/gpu.py."""

import faulthandler
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # all models are made here
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")  # as the server sets it
import torch
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parent))
import gpu_ceiling
import gpu_profile
from card import card, clocks
from gpu_reference import Reference, load
from gpu_rows import Effort, Rows, release
from gpu_state import State
from gpu_variants import DEFAULT, OTHERS, Loaded, Variant, facts
from gpu_work import goals
from scenarios import SHAPES, make_model

from gpuscore.errors import ConfigError

NOTHING, BROKEN = 78, 75  # exit codes, see gpu.py
PROFILED = ("a", "300")


@dataclass(frozen=True)
class Section:
    name: str
    run: Callable[[], None]
    limit: float = 90.0  # seconds after which the section counts as hung
    needs: float = 20.0  # the section is skipped if fewer seconds are left


class Worker:
    """The part of a run that one process does."""

    def __init__(self, state: State) -> None:
        self.state, options = state, state.found["options"]
        self.quick, self.serve = options["quick"], options["serve"]
        self.device = torch.device(options["device"])
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        self.shape_name, self.shape = options["shape"], SHAPES[options["shape"]]
        self.scratch = Path(state.found["scratch"])
        self.goals = goals(self.quick)
        self.effort = Effort(2, 1, 0.5) if self.quick else Effort()
        path = Path(state.found["work"], "reference.npz")
        self.reference = Reference(path, self.shape["vocab_size"], self.quick)

    @cached_property
    def directory(self) -> Path:
        name = str(self.dtype).removeprefix("torch.")
        return make_model(self.shape_name, name, self.scratch)

    @cached_property
    def loaded(self) -> Loaded:
        return Loaded(self.directory, self.device.type, self.quick)

    @property
    def rows(self) -> Rows:
        floors = self.state.found.get("floors", {})
        return Rows(self.goals, self.reference, floors, self.effort, self.state.add)

    def sections(self) -> Iterator[Section]:
        """Yield all sections, the most important first."""
        yield Section("ceilings", self.ceilings)
        yield Section("reference", self.make_reference, limit=150)
        # The first variant compiles all kernels and captures all graphs, hence the limit.
        yield Section(DEFAULT.name, partial(self.variant, DEFAULT), limit=240)
        yield Section("stages", self.stages, limit=60)
        yield Section("engine", self.engine)
        if self.serve:
            yield Section("HTTP", self.http, limit=200, needs=60)
        yield Section("transformers", self.transformers)
        yield Section("profile", self.profile)
        for variant in OTHERS:
            yield Section(variant.name, partial(self.variant, variant))

    # ---- what they do ----

    def ceilings(self) -> None:
        found, floors = gpu_ceiling.measure(
            self.shape, self.goals, self.dtype, self.device, self.quick
        )
        self.state.found |= {"ceilings": found, "floors": floors}
        self.state.found["clocks"]["after the ceilings"] = clocks()
        release()

    def make_reference(self) -> None:
        errors = self.reference.make(self.directory, self.dtype, self.device, self.goals)
        self.state.found["errors of transformers"] = {n: str(v) for n, v in errors.items()}
        self.state.found["tolerance"] = max(1e-4, 4 * max(v.largest for v in errors.values()))
        release()

    def variant(self, variant: Variant) -> None:
        try:
            plan = self.loaded.plan(variant)
        except ConfigError as error:
            self.state.add({"scorer": variant.name, "unavailable": str(error)})
            return
        self.state.found.setdefault("variants", {})[variant.name] = facts(plan)
        backend = self.loaded.backend(variant)
        self.rows.backend(variant.name, backend, judged=variant is DEFAULT, slack=variant.slack)
        runner = backend.launcher
        counts = {name: getattr(runner, name, None) for name in ("replayed", "launched")}
        self.state.found["variants"][variant.name] |= counts

    def stages(self) -> None:
        backend = self.loaded.backend(DEFAULT)
        floors = self.state.found.get("floors", {})
        self.state.found["stages"] = {
            goal.name: gpu_profile.stages(backend, goal, floors.get(goal.name))
            for goal in self.goals
        }
        for name, about in self.state.found["stages"].items():
            print(f"  {name}: {about}", flush=True)

    def engine(self) -> None:
        self.rows.engine(self.loaded.backend(DEFAULT))

    def http(self) -> None:
        allowed = self.state.found.get("tolerance", 1e-4)
        backend = self.loaded.backend(DEFAULT)
        try:
            import gpu_serve

            gpu_serve.measure(
                backend, self.loaded.options, self.directory, allowed, self.quick, self.state.add
            )
        except ImportError as error:
            raise RuntimeError(f"SERVE=1 needs the server's dependencies: {error}") from error
        finally:
            self.loaded.close()  # the engine made there may have closed the backend

    def transformers(self) -> None:
        self.loaded.close()
        model = load(self.directory, self.dtype, self.device)
        self.rows.transformers(model)
        del model
        release()

    def profile(self) -> None:
        backend = self.loaded.backend(DEFAULT)
        path = self.state.path.with_name(f"{self.state.path.stem}-profile.txt")
        with path.open("w") as file:
            for goal in self.goals:
                if goal.name not in PROFILED:
                    continue
                found = gpu_profile.kernels(backend, goal)
                file.write(f"{goal.name}: {goal.workload}, {card(self.device)['device']}\n")
                for row in found:
                    share = f"{row['share']:7.1%}"
                    file.write(f"{row['ms']:10.3f} ms {share} {row['calls']:6}x  {row['name']}\n")
                file.write("\n")
                self.state.found.setdefault("profile", {})[goal.name] = found

    # ---- how they are run ----

    def run(self, section: Section) -> bool:
        """Run a section; return False if this process cannot use the device any more."""
        left = self.state.found["deadline"] - time.time()
        if left < section.needs and not self.quick:
            self.state.end(section.name, "skipped", f"{left:.0f} s were left")
            return True
        # A quick run is a trial, on machines that may have other work.
        limit = max(1.0, left if self.quick else min(section.limit, left))
        self.state.begin(section.name, limit)
        # Prints where it hangs and ends the process, whatever holds the main thread.
        faulthandler.dump_traceback_later(limit, exit=True)
        try:
            section.run()
        except Exception as error:  # noqa: BLE001  (one section must not lose the others)
            traceback.print_exc()
            self.state.end(section.name, "failed", f"{type(error).__name__}: {error}")
        else:
            self.state.end(section.name, "done")
        finally:
            faulthandler.cancel_dump_traceback_later()
        return self._device_works()

    def _device_works(self) -> bool:
        if self.device.type != "cuda":
            return True
        try:
            torch.ones(1, device=self.device).add_(1).item()
        except RuntimeError as error:  # such as an illegal access, after which every call fails
            print(f"  the device has to be opened anew: {error}", flush=True)
            return False
        return True

    def finish(self) -> None:
        self.state.found["clocks"]["after"] = clocks()
        self.state.save()


def main(path: Path) -> int:
    state = State.read(path)
    if state.found["options"]["device"] == "cuda" and not torch.cuda.is_available():
        print("bench/gpu.py needs a CUDA device; this torch sees none", flush=True)
        return NOTHING
    transformers_logging.disable_progress_bar()
    worker = Worker(state)
    if "machine" not in state.found:
        state.found |= {"machine": card(worker.device), "clocks": {"before": clocks()}}
        state.save()
    only = state.found["options"]["sections"] or [""]
    sections = [s for s in worker.sections() if s.name.startswith(tuple(only))]
    state.found["planned"] = [section.name for section in sections]
    for section in sections:
        if section.name in state.sections:
            continue
        if not worker.run(section):
            return BROKEN
    worker.finish()
    return 0


if __name__ == "__main__":
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(code)  # threads of a backend that failed may never end
