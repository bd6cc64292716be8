"""Several processes that share each batch: together they have the images of one process, changed in the same way."""

import numpy as np
import pytest
import torch

from swin_lessons.data import Augment, DataError, ImageArrays, LoaderBatches, TensorBatches, load_dataset
from swin_lessons.data.batches import PRESETS, Share

Image = pytest.importorskip("PIL.Image")
pytest.importorskip("torchvision")

EVERYTHING = Augment(shift=3, flip=0.5, erase=0.6, mixup=0.4, cutmix=0.4)


def arrays() -> ImageArrays:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (26, 1, 16, 16), dtype=np.uint8)
    return ImageArrays(images, np.arange(26) % 5, list("abcde"), mean=(0.3,), std=(0.4,), img_size=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("photos")
    rng = np.random.default_rng(1)
    for name in ("cat", "dog"):
        (root / name).mkdir()
        for number in range(10):
            Image.fromarray(rng.integers(0, 256, (20, 24, 3), dtype=np.uint8)).save(
                root / name / f"{number}.png"
            )
    return load_dataset(f"imagefolder:{root}", split="all", img_size=16)


@pytest.mark.parametrize(
    ("total", "parts", "expected"),
    [
        (8, 1, [[0, 1, 2, 3, 4, 5, 6, 7]]),
        (8, 2, [[0, 1, 6, 7], [2, 3, 4, 5]]),
        (8, 4, [[0, 7], [1, 6], [2, 5], [3, 4]]),
        (6, 2, [[0, 1, 2], [3, 4, 5]]),
        (3, 3, [[0], [1], [2]]),
    ],
)
def test_rows_by_hand(total, parts, expected):
    assert [Share(part, parts).rows(total).tolist() for part in range(parts)] == expected


@pytest.mark.parametrize(("total", "parts"), [(24, 2), (24, 4), (30, 3), (12, 1)])
def test_each_row_has_one_owner_and_its_partner_has_the_same(total, parts):
    rows = [set(Share(part, parts).rows(total).tolist()) for part in range(parts)]
    assert sorted(row for mine in rows for row in mine) == list(range(total))
    if (total // parts) % 2 == 0:
        assert all({total - 1 - row for row in mine} == mine for mine in rows)


def assert_shares_make_the_whole(kind, data, batch, parts, augment):
    whole = kind(data, batch, seed=3, epoch=1, augment=augment, drop_last=True)
    shares = [
        kind(data, batch, seed=3, epoch=1, augment=augment, drop_last=True, share=Share(i, parts))
        for i in range(parts)
    ]
    assert len(whole) == len(shares[0]) >= 2
    for step, (x, y) in enumerate(whole):
        for part, mine in enumerate(shares):
            rows = torch.from_numpy(Share(part, parts).rows(batch))
            images, labels = mine[step]
            torch.testing.assert_close((images, labels), (x[rows], y[rows]), rtol=0, atol=0)
    assert all(
        torch.equal(a[0], b[0])
        for a, b in zip(shares[-1], map(shares[-1].__getitem__, range(len(whole))), strict=True)
    )


@pytest.mark.parametrize("augment", [*PRESETS, EVERYTHING])
@pytest.mark.parametrize(("batch", "parts"), [(12, 2), (12, 3), (6, 2)])
def test_sets_in_memory(augment, batch, parts):
    assert_shares_make_the_whole(TensorBatches, arrays(), batch, parts, augment)


@pytest.mark.parametrize("augment", [*PRESETS, EVERYTHING])
@pytest.mark.parametrize(("batch", "parts"), [(8, 2), (8, 4)])
def test_sets_on_disk(folder, augment, batch, parts):
    assert_shares_make_the_whole(LoaderBatches, folder, batch, parts, augment)


def test_a_process_reads_its_own_images_only(folder, monkeypatch):
    read = []
    original = type(folder).read
    monkeypatch.setattr(
        type(folder), "read", lambda self, index: (read.append(index), original(self, index))[1]
    )
    batches = LoaderBatches(folder, 8, augment="strong", share=Share(1, 2))
    assert len(batches[0][0]) == 4
    assert sorted(read) == sorted(batches.indices(0)[Share(1, 2).rows(8)].tolist())


def test_what_cannot_be_shared_is_named(folder):
    with pytest.raises(
        DataError, match="2 processes cannot share a batch of 7 images equally: use a batch size that 2"
    ):
        TensorBatches(arrays(), 7, share=Share(0, 2))
    with pytest.raises(
        DataError, match=r"6 images make an odd number on each of 2: use a batch size that 4 divides"
    ):
        LoaderBatches(folder, 6, augment="strong", share=Share(0, 2))
    assert len(LoaderBatches(folder, 6, augment="light", share=Share(0, 2))[0][0]) == 3
