"""Ask typed questions over one input, which is read once: decisions.py URL [API_KEY].

The openai package's `decisions` sends the same request with base_url=URL/v1.
"""

import sys

import httpx

BODY = {
    "input": "query: a red lamp\nitem: A red steel lamp.",
    "questions": [
        {"type": "predicate", "name": "fits", "instructions": "The item fits the query."},
        {
            "type": "choice",
            "name": "kind",
            "instructions": "What is the item?",
            "choices": [{"value": "lamp"}, {"value": "chair"}],
        },
    ],
}


def main(url: str, api_key: str | None = None) -> None:
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    answer = httpx.post(f"{url}/v1/decisions", json=BODY, headers=headers, timeout=60)
    answer.raise_for_status()
    for question in answer.json()["answers"]:
        result = (
            question["choice"] if question["type"] == "choice" else f"{question['probability']:.4f}"
        )
        # Near 0 the model would have said something else than a label.
        print(f"{question['name']}: {result} (label mass {question['label_mass']:.4f})")


if __name__ == "__main__":
    main(*sys.argv[1:])
