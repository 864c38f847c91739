"""A runner whose steps the test calls."""

from concurrent.futures import Future

from gpuscore.engine.plan import plan_items
from gpuscore.engine.runner import Runner
from gpuscore.engine.ticket import Progress, Ticket
from gpuscore.types.request import ScoreRequest


def submit(runner: Runner, request: ScoreRequest, progress: Progress | None = None) -> Ticket:
    plan = plan_items(request, runner.backend.limits)
    ticket = Ticket(plan, Future(), progress, arrived_at=0.0)
    runner.add(ticket)
    return ticket


def run(runner: Runner) -> None:
    """Step until the runner is idle; check the pages after every step."""
    for _ in range(10_000):
        if runner.idle:
            break
        runner.step()
        runner.scheduler.pages.check_integrity()
    assert runner.idle
    assert runner.scheduler.pages.num_used == 0
    assert len(runner.scheduler) == 0
