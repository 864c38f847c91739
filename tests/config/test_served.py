"""Promise: models are called by short names, and every wrong `--model` is refused by name."""

import pytest

from gpuscore.commands.cli import main
from gpuscore.config import ModelConfig, ServerConfig
from gpuscore.config.served import served_models
from gpuscore.errors import ConfigError
from gpuscore.models.hub import model_name


def test_a_local_model_is_called_by_its_folders_name(tmp_path, monkeypatch):
    folder = tmp_path / "models" / "my-reranker"
    folder.mkdir(parents=True)
    link = tmp_path / "current"
    link.symlink_to(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_name(str(folder)) == model_name(f"{folder}/") == "my-reranker"
    assert model_name("~/models/my-reranker") == "my-reranker"
    assert model_name(str(link)) == "current"
    monkeypatch.chdir(folder)
    assert model_name(".") == "my-reranker"
    assert model_name("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
    (folder / "demo").mkdir()
    assert model_name("demo") == "demo"


def test_one_model_answers_to_all_its_names(tmp_path):
    (model,) = served_models(ModelConfig(str(tmp_path)), ServerConfig())
    assert (model.name, model.others) == (tmp_path.name, (str(tmp_path),))
    (model,) = served_models(ModelConfig(f"x={tmp_path}"), ServerConfig())
    assert (model.name, model.others) == ("x", (tmp_path.name, str(tmp_path)))
    assert model.sources == (str(tmp_path), tmp_path.name, "x")
    named = ServerConfig(served_model_name="x")
    assert served_models(ModelConfig(str(tmp_path)), named) == [model]
    (model,) = served_models(ModelConfig("demo"), ServerConfig())
    assert (model.name, model.others) == ("demo", ())


def test_several_models_answer_to_their_names_alone():
    both = served_models(ModelConfig("a=demo,b=Org/Name=1", threads=3), ServerConfig())
    assert [(model.name, model.config.model, model.others) for model in both] == [
        ("a", "demo", ()),
        ("b", "Org/Name=1", ()),
    ]
    assert {model.config.threads for model in both} == {3}


def test_a_directory_may_have_any_name(tmp_path):
    folder = tmp_path / "lr=0.1,epoch=3"
    folder.mkdir()
    (model,) = served_models(ModelConfig(str(folder)), ServerConfig())
    assert (model.name, model.config.model) == ("lr=0.1,epoch=3", str(folder))


@pytest.mark.parametrize(
    ("model", "server", "message"),
    [
        ({"model": "demo,a=x"}, {}, "--model demo: must be NAME=MODEL"),
        ({"model": "a="}, {}, "--model a=: must be NAME=MODEL"),
        ({"model": "=demo"}, {}, "must be NAME=MODEL"),
        ({"model": f"{'n' * 129}=demo"}, {}, "up to 128 characters"),
        ({"model": "two words=demo"}, {}, "no spaces"),
        ({"model": "default=demo"}, {}, "and is not default"),
        ({"model": "a=x,b=y,a=z"}, {}, "--model a=... is given twice"),
        (
            {"model": "a=x,b=y", "backend": "jax"},
            {},
            "--backend jax is for one model, and --model names 2",
        ),
        ({"model": "a=x,b=y", "revision": "r"}, {}, "--revision r is for one model"),
        ({"model": "a=x,b=y"}, {"family": "zerank"}, "--family zerank is for one model"),
        ({"model": "a=x,b=y"}, {"served_model_name": "m"}, "--served-model-name m is for one"),
    ],
)
def test_wrong_models(model, server, message):
    with pytest.raises(ConfigError, match=message):
        served_models(ModelConfig(**model), ServerConfig(**server))


def test_a_command_for_one_model_does_not_take_several(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("GPUSCORE_MODEL", "a=x,b=y")
    batch = ["batch", "--input", str(tmp_path), "--output", str(tmp_path / "o.jsonl")]
    assert main(batch) == 78
    assert "MODEL a=x,b=y is neither a directory nor a valid hub name" in capsys.readouterr().err
