"""A file that is rotated, and never holds half of what was given to it."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from router.receipts.file import RotatedFile, files_behind


def filled(path: Path, lines: int, **settings: int) -> list[list[int]]:
    file = RotatedFile(path, **settings)
    for number in range(lines):
        file.append(b"%04d\n" % number)
    file.close()
    return [[int(line) for line in each.read_text().split()] for each in files_behind(path)]


def test_files_have_at_most_the_size_asked_for_and_the_oldest_go(tmp_path: Path) -> None:
    assert filled(tmp_path / "r", 10, max_bytes=10, keep=2) == [[4, 5], [6, 7], [8, 9]]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r", "r.1", "r.2"]


def test_with_none_to_keep_there_is_one_file(tmp_path: Path) -> None:
    assert filled(tmp_path / "r", 5, max_bytes=10, keep=0) == [[4]]


def test_a_line_longer_than_a_file_may_be_is_written_all_the_same(tmp_path: Path) -> None:
    assert filled(tmp_path / "r", 3, max_bytes=2, keep=1) == [[1], [2]]


def test_what_an_earlier_run_wrote_counts_towards_the_size(tmp_path: Path) -> None:
    filled(tmp_path / "r", 2, max_bytes=10, keep=2)
    assert filled(tmp_path / "r", 1, max_bytes=10, keep=2) == [[0, 1], [0]]


class Disk:
    """The file of a disk that has room for some more bytes."""

    def __init__(self, path: Path, room: int) -> None:
        self._file = path.open("ab", buffering=0)
        self._room = room

    def write(self, data: memoryview) -> int:
        if self._room <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = self._file.write(data[: min(3, self._room)])
        assert done is not None
        self._room -= done
        return done

    def truncate(self, size: int) -> int:
        return self._file.truncate(size)

    def close(self) -> None:
        self._file.close()


def test_a_disk_that_fills_up_within_a_write_leaves_whole_lines_and_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "r"
    file = RotatedFile(path, max_bytes=1000, keep=1)
    file.append(b"first\n")
    assert file._file is not None
    file._file.close()
    file._file = Disk(path, room=4)  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space left"):
        file.append(b"second\n")
    assert path.read_text() == "first\n"
    file.append(b"third\n")
    file.close()
    assert path.read_text() == "first\nthird\n"


def test_a_folder_that_went_away_is_an_error_each_time_until_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    file = RotatedFile(folder / "r", max_bytes=3, keep=0)
    file.append(b"one\n")
    (folder / "r").unlink()
    folder.rmdir()
    for _ in range(2):
        with pytest.raises(OSError, match="No such file"):
            file.append(b"two\n")
    folder.mkdir()
    file.append(b"three\n")
    file.close()
    assert (folder / "r").read_text() == "three\n"
