"""Names to data sets."""

import subprocess
import sys

import numpy as np
import pytest
import torch

from swin_lessons.data import DataError, DataSpec, fetch, list_datasets, load_dataset


def test_specs_parse_and_print():
    assert DataSpec.parse("cifar10") == DataSpec("cifar10")
    spec = DataSpec.parse("imagefolder:/a/b:c d")
    assert (spec.name, str(spec.path)) == ("imagefolder", "/a/b:c d")
    assert str(spec) == "imagefolder:/a/b:c d"
    assert "~" not in str(DataSpec.parse("imagefolder:~/x").path)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("fashon-mnist", "did you mean fashion-mnist"),
        ("CIFAR10", "did you mean cifar10"),
        ("/home/me/photos", "imagefolder:PATH"),
        ("", "unknown data set ''"),
        ("imagefolder", "write imagefolder:PATH"),
        ("imagefolder:", "write imagefolder:PATH"),
        ("digits:/x", "bare name"),
    ],
)
def test_bad_specs_are_explained(text, complaint):
    with pytest.raises(DataError, match=complaint):
        load_dataset(text)


def test_list():
    assert list_datasets() == ["fashion-mnist", "cifar10", "cifar100", "digits", "scenes", "imagefolder"]


def test_unknown_split():
    with pytest.raises(DataError, match="'valid' is none of train, val, test"):
        load_dataset("scenes", split="valid")
    with pytest.raises(DataError, match="'all' is none of"):
        load_dataset("scenes", split="all")


def test_val_must_be_asked_for(tmp_path, write_fashion):
    write_fashion(tmp_path)
    with pytest.raises(DataError, match=r"no val split.*val_fraction=0\.1"):
        load_dataset("fashion-mnist", root=tmp_path, split="val")
    parts = [
        load_dataset("fashion-mnist", root=tmp_path, split=s, val_fraction=0.3) for s in ("train", "val")
    ]
    assert [len(part) for part in parts] == [20, 10]
    both = torch.cat([part.images for part in parts]).flatten(1)
    whole = load_dataset("fashion-mnist", root=tmp_path).images.flatten(1)
    assert sorted(both.tolist()) == sorted(whole.tolist())
    assert len(load_dataset("fashion-mnist", root=tmp_path, split="test", val_fraction=0.3)) == 20


def test_digits_are_scikit_learn_s():
    datasets = pytest.importorskip("sklearn.datasets")
    train, test = (load_dataset("digits", split=split) for split in ("train", "test"))
    assert train.images.shape[1:] == (1, 8, 8)
    assert test.labels.bincount().tolist() == pytest.approx([36] * 10, abs=2)
    images = torch.cat([train.images, test.images]).flatten(1).numpy()
    theirs = np.round(datasets.load_digits().data * 255 / 16).astype(np.uint8)
    assert sorted(images.tolist()) == sorted(theirs.tolist())
    assert train.images.max() == 255
    pixels = train.images.double() / 255
    assert pixels.mean().item() == pytest.approx(train.mean.item(), abs=5e-4)
    assert pixels.std().item() == pytest.approx(train.std.item(), abs=5e-4)


def test_unknown_option_is_not_swallowed():
    with pytest.raises(TypeError, match="lenght"):
        load_dataset("scenes", lenght=3)


def test_fetch_refuses_what_is_not_fetched():
    with pytest.raises(DataError, match="'digits' is not fetched"):
        fetch("digits")


BARE = """
import sys
for name in ("PIL", "torchvision", "timm", "sklearn", "matplotlib"):
    sys.modules[name] = None  # as if not installed
from swin_lessons.data import DataError, TensorBatches, load_dataset
print(TensorBatches(load_dataset("scenes", length=4), 2)[0][0].shape)
for spec in ("digits", "imagefolder:/tmp"):
    try:
        load_dataset(spec)
    except DataError as error:
        print(error)
"""


def test_works_without_the_extras_and_names_the_missing_one():
    done = subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=True)
    shape, digits, folder = done.stdout.splitlines()
    assert shape == "torch.Size([2, 3, 64, 64])"
    assert "pip install scikit-learn" in digits
    assert 'pip install "swin-lessons[vision]"' in folder


@pytest.mark.parametrize(
    ("missing", "message"), [("sklearn", "pip install scikit-learn"), ("scipy", "no scipy")]
)
def test_digits_tell_a_missing_package_from_a_broken_one(missing, message, monkeypatch):
    class Refusing:
        def find_spec(self, name, path=None, target=None):
            if name.startswith("sklearn"):
                raise ModuleNotFoundError(f"no {missing}", name=missing)

    for name in [name for name in sys.modules if name.startswith("sklearn")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refusing(), *sys.meta_path])
    with pytest.raises((DataError, ImportError), match=message) as error:
        load_dataset("digits")
    assert isinstance(error.value, DataError) == (missing == "sklearn")
