"""run.json round-trips to equal dataclasses, and what does not fit the schema is refused by name."""

import json

import pytest

from trainer import config


def test_run_json_round_trips_to_equal_dataclasses():
    run = config.RunConfig(model=config.ModelConfig(name="x", num_experts=8, mlp_only_layers=[1]))
    assert config.from_dict(json.loads(config.canonical_json(config.to_dict(run)))) == run


@pytest.mark.parametrize(
    "path, value, message",
    [
        (("optimizer", "lr"), "1e-3", "optimizer.lr"),
        (("train", "steps"), True, "train.steps"),
        (("model", "hiden_size"), 3, "hiden_size"),
    ],
)
def test_what_does_not_fit_is_refused_with_its_key(path, value, message):
    data = config.to_dict(config.RunConfig())
    data[path[0]][path[1]] = value
    with pytest.raises(config.ConfigError, match=message):
        config.from_dict(data)


def test_sparse_layers_follow_the_hugging_face_rule():
    model = config.ModelConfig(num_hidden_layers=6, num_experts=4, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [model.is_sparse(layer) for layer in range(6)] == [False, True, False, False, False, True]
