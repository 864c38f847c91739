"""Rendering of chat templates in a separate process, because a template is a program.

Jinja's sandbox stops a template from reaching Python's internals, but not from looping 10^9 times
or making a text of 10 GB. So the process has limits on time and memory, and its parent waits at
most SECONDS for it.

    python -P -m gpuscore.prompts.rendering < job > outcome

Job and outcome are JSON. The process imports Jinja and no code of the model's.
"""

import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2.exceptions import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from gpuscore.errors import ConfigError

CPU_SECONDS = 2  # of processor time
SECONDS = 10  # of elapsed time
MEMORY = 2**29  # bytes of address space; Python and Jinja use a fifth of them
CHARACTERS = 2**18  # of one rendered conversation
SHOWN = 200  # characters of a reason

# The outcome of a conversation: its text, a refusal, or a limit exceeded.
_TEXT = "text"
_REFUSED = "refused"
_LIMIT = "limit"


class TemplateLimit(ConfigError):
    """The template exceeds a limit, so the model is not served at all."""


def render(
    template: str,
    variables: Mapping[str, object],
    conversations: Sequence[Sequence[Mapping[str, object]]],
) -> list[str | ConfigError]:
    """Return each rendered conversation, or the error that says why it cannot be rendered.

    Raises:
        TemplateLimit: the template takes too long or too much memory, or makes too much text.
    """
    job = json.dumps([template, dict(variables), list(map(list, conversations))])
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "gpuscore.prompts.rendering"],
            input=job.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TemplateLimit(f"the chat template runs for over {SECONDS} seconds") from error
    if code := done.returncode:
        ending = f"exit code {code}" if code > 0 else f"signal {-code}"
        raise TemplateLimit(
            f"the chat template ends its process ({ending}); it may take {CPU_SECONDS} seconds and "
            f"{MEMORY // 2**20} MiB"
        )
    outcomes: list[tuple[str, str]] = json.loads(done.stdout)
    for kind, reason in outcomes:
        if kind == _LIMIT:
            raise TemplateLimit(f"the chat template is not rendered: {reason}")
    return [text if kind == _TEXT else ConfigError(text) for kind, text in outcomes]


def main() -> None:
    template, variables, conversations = json.load(sys.stdin)
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    outcomes = [_outcome(template, variables, messages) for messages in conversations]
    json.dump(outcomes, sys.stdout)


def _outcome(template: str, variables: dict[str, Any], messages: Any) -> tuple[str, str]:
    """Return a conversation's outcome, with its text or the reason."""
    try:
        text = _rendered(template, variables, messages)
    except MemoryError:
        return _LIMIT, f"it takes more than {MEMORY // 2**20} MiB of memory"
    except RecursionError:
        return _LIMIT, "it calls itself without end"
    except OverflowError as error:  # from the sandbox, for a range of over 100,000 numbers
        return _LIMIT, _one_line(error)
    except TemplateError as error:
        more = "; it would be another prompt each day: write a date into the template"
        return _REFUSED, _one_line(error) + more * ("strftime_now" in str(error))
    except Exception as error:  # noqa: BLE001  (a template may raise any error)
        return _REFUSED, _one_line(f"{type(error).__name__}: {error}")
    if len(text) > CHARACTERS:
        return _LIMIT, f"it makes {len(text):,} characters; supported: at most {CHARACTERS:,}"
    return _TEXT, text


def _one_line(reason: object) -> str:
    text = " ".join(str(reason).split())
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def _rendered(template: str, variables: dict[str, Any], messages: Any) -> str:
    """Render a chat template as transformers does, in Jinja's sandbox.

    Functions whose results change are left out: transformers' `strftime_now`, and Jinja's `lipsum`
    and `random`.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    del environment.globals["lipsum"], environment.filters["random"]
    environment.globals["raise_exception"] = _refuse
    return environment.from_string(template).render(messages=messages, **variables)


def _refuse(message: str) -> NoReturn:
    """Raise an error; templates call it as `raise_exception` for conversations they refuse."""
    raise TemplateError(message)


if __name__ == "__main__":
    main()
