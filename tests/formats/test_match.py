"""The same network in two frameworks: which tensor is which, or a refusal where that cannot be told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import evergrad as eg
from evergrad.errors import AmbiguousMatch


class Net(torch.nn.Module):
    """Two convolutions, a normalisation, two dense layers, an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(10, 6)
        self.first = torch.nn.Conv2d(3, 8, 3)
        self.norm = torch.nn.BatchNorm2d(8)
        self.second = torch.nn.Conv2d(8, 8, (3, 5))
        self.hidden = torch.nn.Linear(7, 7)
        self.out = torch.nn.Linear(7, 4, bias=False)


def saved(folder: Path, model: torch.nn.Module, name: str = "net.pt") -> Path:
    torch.save({"model": model.state_dict()}, folder / name)
    return folder / name


def keras_like(model: Net) -> dict[str, np.ndarray]:
    """The same weights as Keras' legacy files name and lay them out."""
    state = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    return {
        "model_weights/conv2d/kernel": state["first.weight"].transpose(2, 3, 1, 0),
        "model_weights/conv2d/bias": state["first.bias"],
        "model_weights/bn/gamma": state["norm.weight"],
        "model_weights/bn/beta": state["norm.bias"],
        "model_weights/bn/moving_mean": state["norm.running_mean"],
        "model_weights/bn/moving_variance": state["norm.running_var"],
        "model_weights/conv2d_1/kernel": state["second.weight"].transpose(2, 3, 1, 0),
        "model_weights/conv2d_1/bias": state["second.bias"],
        "model_weights/dense/kernel": state["hidden.weight"].T,
        "model_weights/dense/bias": state["hidden.bias"],
        "model_weights/dense_1/kernel": state["out.weight"].T,
        "model_weights/embedding/embeddings": state["embed.weight"],
    }


def test_layouts_are_turned_and_every_parameter_finds_its_twin(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    pt = saved(tmp_path, model)
    np.savez(tmp_path / "keras.npz", **keras_like(model))
    matching = eg.match(pt, tmp_path / "keras.npz")
    assert matching["model/first.weight"].axes == (2, 3, 1, 0)
    assert matching["model/second.weight"].b == "model_weights/conv2d_1/kernel"
    assert matching["model/hidden.weight"].axes == (1, 0), "square, so only the convention tells"
    assert matching["model/embed.weight"].axes is None
    assert matching["model/norm.running_var"].b == "model_weights/bn/moving_variance"
    assert matching.only_a == ("model/norm.num_batches_tracked",)
    assert matching.only_b == ()
    back = eg.match(tmp_path / "keras.npz", pt)
    assert back["model_weights/conv2d/kernel"].axes == (3, 2, 0, 1)
    with eg.open_checkpoint(pt) as a, eg.open_checkpoint(tmp_path / "keras.npz") as b:
        for pair in matching.pairs:
            ours = a.read(pair.a)
            assert torch.equal(ours.permute(pair.axes) if pair.axes else ours, b.read(pair.b)), pair


def test_diff_across_frameworks_compares_axis_by_axis(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Net()
    pt = saved(tmp_path, model)
    np.savez(tmp_path / "keras.npz", **keras_like(model))
    comparison = eg.compare(pt, tmp_path / "keras.npz", where="model/**.weight")
    assert comparison.equal
    assert "matched by layer" in comparison.note
    with eg.open_checkpoint(tmp_path / "keras.npz") as ck:
        ck.xor("model_weights/conv2d_1/kernel", [7], [1 << 31])
    changed = eg.compare(pt, tmp_path / "keras.npz").different
    assert [(row.name, row.changed) for row in changed if row.status == "changed"] == [("model/second.weight", 1)]


def test_layers_of_the_same_shape_are_told_apart_by_their_order(tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(12)))
    arrays = {}
    for number, layer in enumerate(model):
        name = "dense" if number == 0 else f"dense_{number}"
        arrays[f"{name}/kernel"] = layer.weight.detach().numpy().T
        arrays[f"{name}/bias"] = layer.bias.detach().numpy()
    np.savez(tmp_path / "keras.npz", **dict(sorted(arrays.items())))  # as HDF5 lists them: dense_10 before dense_2
    matching = eg.match(saved(tmp_path, model), tmp_path / "keras.npz")
    assert matching["model/10.weight"].b == "dense_10/kernel"
    assert matching["model/2.weight"].b == "dense_2/kernel"


def test_equal_names_win_over_order(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"query": torch.nn.Linear(4, 4), "key": torch.nn.Linear(4, 4)})
    arrays = {f"{name}/W": model[name].weight.detach().numpy() for name in ("key", "query")}
    arrays |= {f"{name}/b": model[name].bias.detach().numpy() for name in ("key", "query")}
    np.savez(tmp_path / "chainer.npz", **arrays)
    matching = eg.match(saved(tmp_path, model), tmp_path / "chainer.npz")
    assert matching["model/query.weight"].b == "query/W"
    assert matching["model/query.weight"].axes is None, "Chainer lays weights out as PyTorch does"


def test_what_cannot_be_told_apart_is_refused(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"query": torch.nn.Linear(4, 4), "key": torch.nn.Linear(4, 4)})
    np.savez(tmp_path / "x.npz", **{f"{n}/W": np.zeros((4, 4), np.float32) for n in ("alpha", "omega")})
    torch.save({k: v for k, v in model.state_dict().items() if "weight" in k}, tmp_path / "a.pt")
    with pytest.raises(AmbiguousMatch, match=r"'query', 'key' could each be 'alpha', 'omega'"):
        eg.match(tmp_path / "a.pt", tmp_path / "x.npz")
    comparison = eg.compare(tmp_path / "a.pt", tmp_path / "x.npz")
    assert not comparison.equal
    assert "could each be" in comparison.note


def test_wrappers_are_ignored_and_strangers_have_no_partner(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    torch.save({f"module._orig_mod.fc.{k}": v for k, v in model.state_dict().items()}, tmp_path / "a.pt")
    torch.save(
        {f"fc.{k}": v for k, v in model.state_dict().items()} | {"other.weight": torch.ones(9, 9)}, tmp_path / "b.pt"
    )
    matching = eg.match(tmp_path / "a.pt", tmp_path / "b.pt")
    assert matching["module._orig_mod.fc.weight"].b == "fc.weight"
    assert matching.only_b == ("other.weight",)
    assert "other.weight" in str(matching)
    assert matching.to_json()["only_b"] == ["other.weight"]


@pytest.mark.parametrize("keras", ["tf_keras.weights.h5", "tf_keras_full.h5", "tf_keras_full.keras"])
def test_real_files_of_chainer_and_keras_are_matched_layer_by_layer(keras: str, data: Path) -> None:
    matching = eg.match(data / "chainer_convnet_gzip.h5", data / keras)
    assert [pair.a for pair in matching.pairs if pair.axes == (2, 3, 1, 0)] == ["conv1/W"]
    assert [pair.a for pair in matching.pairs if pair.axes == (1, 0)] == ["fc/W"]
    assert len(matching.pairs) == 8
    with eg.open_checkpoint(data / keras) as ck:
        assert ck.tensors[matching["bn1/avg_var"].b].shape == (4,)


def test_the_same_keras_model_is_equal_in_both_of_its_formats(data: Path) -> None:
    assert eg.compare(data / "tf_keras_full.h5", data / "tf_keras_full.keras", where="model_weights").equal


def test_one_layer_that_could_be_either_of_two_is_refused_without_a_crash(tmp_path: Path) -> None:
    weight = torch.ones(4, 4)
    torch.save({"enc": {"conv.weight": weight}, "dec": {"conv.weight": weight.clone()}}, tmp_path / "a.pt")
    torch.save({"other": {"conv.weight": weight}}, tmp_path / "b.pt")
    with pytest.raises(AmbiguousMatch):
        eg.match(tmp_path / "a.pt", tmp_path / "b.pt")
