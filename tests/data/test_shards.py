from __future__ import annotations

import gzip
import io
import logging
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
from pydantic import ValidationError

from flava_tnt.data.loader import make_loader
from flava_tnt.data.sources import open_readers
from flava_tnt.data.tokenizer import learn_tokenizer
from flava_tnt.data.transforms import to_rgb
from flava_tnt.data.urls import expand_braces
from flava_tnt.errors import DataError
from flava_tnt.plugin import BadSample, SampleReader
from flava_tnt_plugins.shards import Shards
from tests.data.helpers import caption_of, make_setup, pair_files, picture_bytes, tar_bytes, write_shards


def reader_of(source: Shards) -> SampleReader:
    return source.open(make_setup({"shards": source}))


def ids(reader: SampleReader) -> list[str]:
    return [reader.read(i).id for i in range(len(reader))]


# ---------------------------------------------------------------------------------------------- urls


def test_samples_stand_in_the_order_of_shards_and_of_keys(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, num_shards=2, per_shard=3)
    reader = reader_of(Shards(urls=urls))
    names = [f"part-{i // 3:06d}/{i:04d}" for i in range(6)]
    assert ids(reader) == names
    assert ids(reader_of(Shards(urls=urls[::-1]))) == names[3:] + names[:3]


@pytest.mark.parametrize(
    "pattern", ["part-{000000..000002}.tar", "part-00000{0,1,2}.tar", "part-*.tar", "part-00000[0-2].tar"]
)
def test_braces_and_wildcards_name_the_same_shards(tmp_path: Path, pattern: str) -> None:
    write_shards(tmp_path, num_shards=3, per_shard=2)
    reader = reader_of(Shards(urls=f"{tmp_path}/{pattern}"))
    assert [name[:11] for name in ids(reader)] == [f"part-{i // 2:06d}" for i in range(6)]


def test_a_shard_named_twice_is_taken_once(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, num_shards=1, per_shard=3)
    assert len(reader_of(Shards(urls=[*urls, f"{tmp_path}/*.tar"]))) == 3


def test_shards_of_one_name_in_two_folders_have_ids_of_their_own(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_shards(tmp_path / folder, num_shards=1, per_shard=2)
    assert len(set(ids(reader_of(Shards(urls=f"{tmp_path}/{{a,b}}/*.tar"))))) == 4


def test_braces_nest_and_keep_zeros() -> None:
    assert list(expand_braces("x{08..11}")) == ["x08", "x09", "x10", "x11"]
    assert list(expand_braces("{a,b}{1..2}")) == ["a1", "a2", "b1", "b2"]
    assert list(expand_braces("plain")) == ["plain"]


@pytest.mark.parametrize("url", ["x{3..1}", "x{a..c}", "x{}"])
def test_braces_that_say_nothing_are_refused(url: str) -> None:
    with pytest.raises(DataError, match="is neither a range"):
        list(expand_braces(url))


def test_options_are_strict() -> None:
    assert Shards(urls=["/a", "s3://b"]).urls == ["/a", "s3://b"]
    for wrong in ({}, {"urls": 3}, {"urls": ""}, {"urls": []}, {"urls": "a", "url": "b"}):
        with pytest.raises(ValidationError):
            Shards(**wrong)


# ------------------------------------------------------------------------------------------- reading


def test_a_sample_is_its_picture_and_caption(tmp_path: Path) -> None:
    reader = reader_of(Shards(urls=write_shards(tmp_path, per_shard=4)))
    for index in (5, 0, 7, 5):
        sample = reader.read(index)
        assert sample.text == caption_of(index)
        assert sample.image is not None
        expected = to_rgb(fsspec_image(picture_bytes(index)), "x")
        assert (np.asarray(to_rgb(sample.image, "x")) == np.asarray(expected)).all()
        assert reader.read_text(index) == caption_of(index)


def fsspec_image(data: bytes):  # type: ignore[no-untyped-def]
    from PIL import Image

    return Image.open(io.BytesIO(data))


def test_only_what_a_modality_needs_is_read(tmp_path: Path) -> None:
    reader = reader_of(Shards(urls=write_shards(tmp_path)))
    assert reader.read_for(0, "text").image is None
    assert reader.read_for(0, "image").text is None


def test_names_with_folders_dots_and_capitals_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    long_name = "deep/" + "n" * 150
    files = {
        "a/one.JPG": picture_bytes(kind="JPEG"),
        "a/one.seg.png": b"not its picture",
        "a/one.TXT": b" first \n",
        "b/one.png": picture_bytes(),
        "b/one.txt": "zwölf".encode(),
        f"{long_name}.png": picture_bytes(),
        f"{long_name}.txt": b"long",
        "a/._one.txt": b"left by a Mac",
        "__index__": b"",
    }
    path.write_bytes(tar_bytes(files))
    reader = reader_of(Shards(urls=str(path)))
    assert ids(reader) == ["x/a/one", "x/b/one", f"x/{long_name}"]
    assert [reader.read_text(i) for i in range(3)] == ["first", "zwölf", "long"]


def test_other_extensions_can_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes({"1.tif": picture_bytes(kind="TIFF"), "1.caption": b"hello"}))
    reader = reader_of(Shards(urls=str(path), image_extensions=[".tif"], text_extension="caption"))
    assert reader.read(0).text == "hello"


def test_shards_of_captions_feed_text_and_shards_of_pictures_feed_images(tmp_path: Path) -> None:
    (tmp_path / "texts.tar").write_bytes(tar_bytes({f"{i}.txt": b"a dog" for i in range(3)}))
    (tmp_path / "pictures.tar").write_bytes(tar_bytes({f"{i}.png": picture_bytes(i) for i in range(2)}))
    assert len(reader_of(Shards(urls=f"{tmp_path}/texts.tar", modalities=["text"]))) == 3
    assert len(reader_of(Shards(urls=f"{tmp_path}/pictures.tar", modalities=["image"]))) == 2


def test_incomplete_keys_are_left_out_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "x.tar"
    path.write_bytes(tar_bytes({**pair_files([1, 2]), "3.png": picture_bytes()}))
    with caplog.at_level(logging.WARNING, logger="flava_tnt"):
        reader = reader_of(Shards(urls=str(path)))
    assert ids(reader) == ["x/0001", "x/0002"]
    assert "1 of 3 keys are no pairs" in caplog.text


def test_pictures_and_captions_that_cannot_be_used_are_bad_samples(tmp_path: Path) -> None:
    path = tmp_path / "x.tar"
    files = {
        "1.png": b"no picture",
        "1.txt": b"a",
        "2.png": picture_bytes(),
        "2.txt": b"\xff\xfe",
        "3.png": b"",
        "3.txt": b"",
    }
    path.write_bytes(tar_bytes(files))
    reader = reader_of(Shards(urls=str(path)))
    for index, message in enumerate(("x/1: no picture", "x/2: its caption is not UTF-8", "x/3: no picture")):
        with pytest.raises(BadSample, match=message):
            reader.read(index)
    assert reader.read_text(2) == ""


# -------------------------------------------------------------------------------------------- broken


def damaged(data: bytes) -> bytes:
    """With a header in the middle overwritten."""
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        offset = tar.getmembers()[4].offset
    return data[:offset] + b"\x01" * 512 + data[offset + 512 :]


def ends_after_a_member(data: bytes) -> bytes:
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        return data[: tar.getmembers()[4].offset]


WHOLE = tar_bytes(pair_files(range(4)))
BROKEN = {
    "empty": (b"", r"is empty \(0 bytes\)"),
    "truncated in a file": (WHOLE[:2000], "is truncated"),
    "truncated in a header": (WHOLE[:100], "is truncated"),
    "truncated between files": (ends_after_a_member(WHOLE), "is truncated"),
    "damaged": (damaged(WHOLE), "is damaged"),
    "no tar": (b"text " * 1000, "is no uncompressed tar file"),
    "compressed": (gzip.compress(WHOLE), "is no uncompressed tar file"),
    "without files": (tar_bytes({}), "holds no pairs .* it holds no files"),
    "pictures alone": (
        tar_bytes({f"{i}.png": picture_bytes() for i in range(3)}),
        r"holds no pairs \(\.jpg/.*/\.bmp with \.txt\); it holds 3 x \.png$",
    ),
    "other captions": (
        tar_bytes({"1.png": picture_bytes(), "1.caption": b"a", "1.json": b"{}"}),
        r"it holds 1 x \.png, 1 x \.caption, 1 x \.json$",
    ),
    "a name twice": (
        tar_bytes([("1.png", picture_bytes()), ("1.txt", b"a"), ("1.txt", b"b")]),
        r"holds 1\.txt twice",
    ),
}


@pytest.mark.parametrize("name", list(BROKEN))
def test_a_broken_shard_is_refused_in_one_line_that_names_it(tmp_path: Path, name: str) -> None:
    data, message = BROKEN[name]
    good, broken = tmp_path / "part-0.tar", tmp_path / "part-1.tar"
    good.write_bytes(WHOLE)
    broken.write_bytes(data)
    with pytest.raises(DataError, match=message) as caught:
        reader_of(Shards(urls=f"{tmp_path}/*.tar"))
    assert str(broken) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("{folder}/none.tar", r"none\.tar does not exist"),
        ("{folder}/*.tar", r"\*\.tar matches no file"),
        ("memory://nowhere/x.tar", r"memory://nowhere/x\.tar does not exist"),
        ("memory://nowhere/*.tar", "matches no file"),
        ("nosuch://bucket/x.tar", "nosuch://bucket/x.tar: Protocol not known"),
        ("{folder}", "is a folder; name its files"),
    ],
)
def test_a_shard_that_is_not_there_is_named(tmp_path: Path, url: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        reader_of(Shards(urls=url.replace("{folder}", str(tmp_path))))


def test_a_shard_that_shrinks_or_goes_during_a_run_is_named(tmp_path: Path) -> None:
    (url,) = write_shards(tmp_path, num_shards=1)
    reader = reader_of(Shards(urls=url))
    Path(url).write_bytes(Path(url).read_bytes()[:4096])
    with pytest.raises(DataError, match=r"part-000000\.tar has changed"):
        reader.read(7)
    Path(url).unlink()
    with pytest.raises(DataError, match=r"part-000000\.tar cannot be read"):
        reader.read(7)


# -------------------------------------------------------------------------------------- whole batches


@pytest.fixture
def memory_shards() -> str:
    for shard in range(2):
        files = pair_files(range(shard * 20, shard * 20 + 20))
        if shard == 1:
            files["0025.png"] = files["0025.png"][:100]
        with fsspec.open(f"memory://shards/part-{shard}.tar", "wb") as file:
            file.write(tar_bytes(files))
    return "memory://shards/part-*.tar"


def test_shards_on_any_storage_give_the_same_batches_with_workers(memory_shards: str) -> None:
    contents = []
    for workers in (0, 2):
        setup = make_setup(
            {"shards": Shards(urls=memory_shards)}, train={"max_steps": 8, "data_workers": workers}
        )
        readers = open_readers(setup)
        tokenizer = learn_tokenizer((readers["text"].read_text(i) for i in range(40)), 500)
        loader = make_loader(setup, rank=0, start_step=0, tokenizer=tokenizer, readers=readers)
        contents.append(
            [
                (
                    batch.modality,
                    batch.sample_ids,
                    batch.bad_samples,
                    {name: x.numpy().tobytes() for name, x in batch.tensors().items()},
                )
                for batch in loader
            ]
        )
    assert contents[0] == contents[1]
    bad = [bad for _, _, bad_samples, _ in contents[0] for bad in bad_samples]
    assert {id for id, _ in bad} == {"part-1/0025"}
