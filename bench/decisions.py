"""Measure how far the order of options moves the demo model's answers to typed questions.

python -P bench/decisions.py
"""

import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from report import machine, table

DEMO = Path(__file__).parents[1] / "gpuscore" / "demo"


def order_of_options() -> str:
    """Measure the change of an option's probability when the options are in reverse order, and the
    share of right answers then, on choices about the demo's world that its training never saw."""
    sys.path.insert(0, str(DEMO.parents[1] / "training"))
    from demo.questions import labelled_questions
    from gpuscore import Choice, Scorer

    asked = [
        (
            state,
            question.body.get("instructions", "Which?"),
            question.body["criteria"],
            question.answer,
        )
        for state, questions in labelled_questions(1000, seed=1)
        for question in questions.values()
        if question.body["type"] == "choice"
    ]
    rows = []
    for order in ("fixed", "balanced"):
        with Scorer("demo", decision_order=order) as scorer:
            for least, most in ((2, 4), (5, 26)):
                moved, right = [], []
                chosen = [question for question in asked if least <= len(question[2]) <= most]
                for state, text, criteria, answer in chosen:
                    told = {name: about or "" for name, about in criteria.items()}
                    there, back = (
                        scorer.system_one(state, {"q": Choice(text, options)})["q"]
                        for options in (told, dict(reversed(told.items())))
                    )
                    moved += [abs(there.probabilities[n] - back.probabilities[n]) for n in told]
                    right += [there.answer == answer, back.answer == answer]
                rows.append(
                    {"order": order, "options": f"{least} to {most}", "choices": len(chosen)}
                    | {"mean change": f"{statistics.mean(moved):.4f}"}
                    | {"right": f"{statistics.mean(right):.3f}"}
                )
    return f"\ndemo model, choices about its world; {machine()}\n\n{table(rows)}"


if __name__ == "__main__":
    print(order_of_options())
