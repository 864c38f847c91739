"""Measurements of what each rounding point of half precision does to scores, beside peers.

    bench/rounding.py --model DIRECTORY            # yes or no to 200 real sentences
    bench/rounding.py --shape qwen3-0.6b           # random weights and ids, 500 + 100 x 20
    bench/rounding.py --shape qwen3-0.6b --vllm .venv-vllm/bin/python
    bench/rounding.py --model DIRECTORY --no-points --int8   # docs/how-to/quantization.md

Errors are errors in log p of two labels against float32, over all items; tau-b is computed of the
margin between the labels. Points come from `rounding_points.py`, a decoder of its own in float32
that rounds where it is told to. The runs below them are whole: transformers and vLLM's CPU build in
bfloat16, and gpuscore, with `--int8` also in all forms of INT8 that a start chooses from.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils import logging as transformers_logging

sys.path.insert(0, str(Path(__file__).parent))
import baselines
from report import Row, keep, machine, table
from rounding_points import OF_GPUSCORE, POINTS, Prompts, RoundedDecoder
from scenarios import Workload
from spent import spent

from gpuscore import Scorer, backends
from gpuscore.backends.common.eight_bits.recipe import Recipe
from gpuscore.backends.common.eight_bits.texts import read_texts
from gpuscore.backends.torch.recipes import FORMS
from gpuscore.measure.bench.random_models import SHAPES, make_model
from gpuscore.measure.parity.metrics import kendall_tau_b

Scores = NDArray[np.float64]
HERE = Path(__file__).parent
SCRATCH = HERE.parent / "scratch"
LABELS = " yes", " no"
QUERY, END = "Read this sentence.\n", "\nIs this good news? Answer yes or no:"


def main() -> None:
    options = arguments()
    transformers_logging.disable_progress_bar()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.model is None:
        directory = make_model(options.shape, "bfloat16", options.scratch)
        query, items = Workload(*options.sizes).draw(SHAPES[options.shape]["vocab_size"])
        prompts = Prompts(query, items, baselines.LABELS)
    else:
        directory = options.model.resolve()
        prompts = real_prompts(directory, options.texts)
    rows = measured(directory, prompts, options)
    about = {"bench": "rounding", "model": directory.name, "tokens": prompts.tokens}
    print(f"\n{directory.name}, {len(prompts.items)} items, {prompts.tokens} tokens; {machine()}\n")
    print(table(rows))
    keep("rounding", about | {"rows": rows})


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a directory; default: random weights")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--sizes", type=int, nargs=3, default=(500, 100, 20), help="of --shape")
    parser.add_argument("--texts", type=int, default=200, help="sentences for --model")
    parser.add_argument("--vllm", help="an interpreter that has vLLM's CPU build")
    parser.add_argument("--int8", action="store_true", help="also all forms of INT8")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--scratch", type=Path, default=SCRATCH)
    parser.add_argument("--no-points", action="store_true", help="whole runs only")
    parser.add_argument(
        "--without",
        nargs="+",
        action="append",
        default=[],
        choices=POINTS,
        metavar="POINT",
        help="also all points but these together",
    )
    return parser.parse_args()


def real_prompts(directory: Path, count: int) -> Prompts:
    """Return questions about the sentences that judge eight bits, for a model with a tokenizer."""
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    texts = read_texts(None)[:count]
    query, *items = (tokenizer.encode(s).ids for s in (QUERY, *(s + END for s in texts)))
    return Prompts(query, items, [tokenizer.encode(word).ids[0] for word in LABELS])


def measured(directory: Path, prompts: Prompts, options: argparse.Namespace) -> list[Row]:
    decoder = RoundedDecoder(directory)
    exact = decoder.score(prompts, ()).numpy()
    rows = [] if options.no_points else list(of_points(decoder, prompts, exact, options.without))
    del decoder
    for name, run in whole_runs(directory, prompts, options):
        rows.append(row(name, run, exact))
        print(rows[-1], flush=True)
    return rows


def of_points(
    decoder: RoundedDecoder, prompts: Prompts, exact: Scores, without: list[list[str]]
) -> Iterator[Row]:
    ways = [(f"only {POINTS[point]}", {point}) for point in POINTS]
    ways += [("all of these, as transformers", set(POINTS)), ("as gpuscore", set(OF_GPUSCORE))]
    ways += [(f"all but {', '.join(some)}", set(POINTS) - set(some)) for some in without]
    for name, points in ways:
        measured = row(name, partial(decoder.score, prompts, points), exact)
        print(measured, flush=True)
        yield measured


def row(name: str, run: Callable[[], object], exact: Scores) -> Row:
    """Return one line of the table."""
    kept: list[Scores] = []
    time = spent(lambda: kept.append(np.asarray(run(), dtype=np.float64)))
    got = kept[0]
    off = np.abs(got - exact)
    margins = [scores[:, 0] - scores[:, 1] for scores in (exact, got)]
    best = [set(np.argsort(-margin)[: max(1, len(margin) // 5)]) for margin in margins]
    return {
        "rounded": name,
        "mean error": f"{off.mean():.5f}",
        "p99": f"{np.percentile(off, 99):.4f}",
        "tau-b": f"{kendall_tau_b(*margins):.4f}",
        "best fifth kept": f"{len(best[0] & best[1])} of {len(best[0])}",
        "CPU s": f"{time.cpu:.1f}",
    }


def whole_runs(
    directory: Path, prompts: Prompts, options: argparse.Namespace
) -> Iterator[tuple[str, Callable[[], Scores]]]:
    for kept in FORMS if options.int8 else ():
        with in_int8(directory, kept) as scorer:
            yield (
                f"gpuscore, int8, {scorer.eight_bits.partition(': ')[2]}",
                partial(ours, scorer, prompts),
            )
    for backend, dtype in (("torch", "float32"), ("torch", "bfloat16"), ("jax", "bfloat16")):
        with Scorer(str(directory), backend=backend, dtype=dtype, max_model_len=4096) as scorer:
            yield f"gpuscore on {backend}, {dtype}", partial(ours, scorer, prompts)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    yield "transformers, bfloat16", partial(theirs, model, prompts)
    del model
    if options.vllm is not None:
        run = partial(of_vllm, options.vllm, directory, prompts)
        yield "vLLM, bfloat16 (with its start)", run


def in_int8(directory: Path, kept: tuple[str, ...]) -> Scorer:
    """Return the model in INT8 with these groups of products in bfloat16, whatever texts say."""
    recipe = Recipe("of the bench", kept, (), (), ())
    with (
        patch.object(backends, "recipe_of", return_value=recipe),
        patch.object(backends, "judge"),
    ):
        how = {"dtype": "bfloat16", "quantization": "int8"}
        return Scorer(str(directory), **how, max_model_len=4096)


def ours(scorer: Scorer, prompts: Prompts) -> Scores:
    labels = prompts.labels
    scores = scorer.score(prompts.query, prompts.items, label_token_ids=labels, logprobs=True)
    if scores.logprobs is None:
        raise RuntimeError("no log-probabilities")
    return scores.logprobs


@torch.inference_mode()
def theirs(model: PreTrainedModel, prompts: Prompts) -> Scores:
    """Score with transformers: the query's keys and values once, items of one length together."""
    query, logprobs = DynamicCache(), np.empty((len(prompts.items), len(prompts.labels)))
    model(torch.tensor([prompts.query]), None, None, query, use_cache=True, logits_to_keep=1)
    lengths = np.array([len(item) for item in prompts.items])
    for length in np.unique(lengths):
        places = np.flatnonzero(lengths == length)
        ids = torch.tensor([prompts.items[place] for place in places])
        copies = (
            tuple(x.expand(len(ids), -1, -1, -1) for x in (layer.keys, layer.values))
            for layer in query.layers
        )
        out = model(ids, None, None, DynamicCache(list(copies)), use_cache=True, logits_to_keep=1)
        scores = torch.log_softmax(out.logits[:, -1].double(), dim=-1)
        logprobs[places] = scores[:, prompts.labels].numpy()
    return logprobs


def of_vllm(python: str, directory: Path, prompts: Prompts) -> Scores:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "prompts.json")
        longest = len(prompts.query) + max(map(len, prompts.items))
        file.write_text(json.dumps(vars(prompts) | {"dtype": "bfloat16", "longest": longest}))
        command = [python, str(HERE / "rounding_vllm.py"), str(directory), str(file)]
        subprocess.run(command, check=True, cwd=folder)
        return np.array(json.loads(file.read_text()))


if __name__ == "__main__":
    main()
