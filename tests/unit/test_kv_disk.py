import errno
import os
import stat

import pytest

from shoal.backend.engine_config import ConfigError
from shoal.backend.kv_disk import MAX_QUEUED_STORES, DiskInUse, DiskOutcome, KVDisk

SIZE = 1000
MODEL, OTHER_MODEL = b"m" * 32, b"o" * 32
TOKENS = tuple(range(16))


def payload(seed):
    return bytearray((seed + i) % 256 for i in range(SIZE))


def digest(seed):
    return bytes([seed]) * 32


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "kv"


@pytest.fixture
def disk(folder):
    disk = KVDisk(folder, MODEL, SIZE)
    yield disk
    disk.close()


def stored(disk, *seeds):
    for seed in seeds:
        assert disk.store(digest(seed), TOKENS, payload(seed))
    outcomes = collect(disk, len(seeds))
    assert outcomes == [DiskOutcome(digest(seed), False, True) for seed in seeds]


def collect(disk, count):
    outcomes = []
    while len(outcomes) < count:
        outcomes += disk.take_outcomes(10)
    return outcomes


def load(disk, seed, tokens=TOKENS):
    disk.load(digest(seed), tokens)
    (outcome,) = collect(disk, 1)
    assert outcome.loaded
    assert outcome.ok == (outcome.payload is not None)
    return outcome.payload


def test_what_was_stored_is_loaded(disk):
    stored(disk, 1, 2)
    assert load(disk, 2) == payload(2)
    assert load(disk, 1) == payload(1)
    assert load(disk, 3) is None


def test_it_is_there_after_a_restart_oldest_first(folder, disk):
    stored(disk, 3)
    stored(disk, 1)
    os.utime(disk.path(digest(1)), ns=(10**18, 10**18))
    disk.close()
    again = KVDisk(folder, MODEL, SIZE)
    assert again.digests() == [digest(1), digest(3)]
    assert load(again, 3) == payload(3)
    again.close()


def test_nobody_else_may_read_it(folder, disk):
    stored(disk, 1)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(disk.path(digest(1)).parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(disk.path(digest(1)).stat().st_mode) == 0o600


def flip(position):
    def damage(path):
        contents = bytearray(path.read_bytes())
        contents[position] ^= 1
        path.write_bytes(contents)

    return damage


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def empty(path):
    path.write_bytes(b"")


def fold(path):
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    "damage",
    [flip(0), flip(20), flip(50), flip(90), flip(500), flip(-1), truncate, lengthen, empty],
)
def test_a_damaged_file_is_a_miss_and_is_removed(disk, damage):
    stored(disk, 1)
    damage(disk.path(digest(1)))
    assert load(disk, 1) is None
    assert not disk.path(digest(1)).exists()


def test_something_else_in_its_place_is_a_miss(disk, tmp_path):
    stored(disk, 1, 2)
    fold(disk.path(digest(1)))
    assert load(disk, 1) is None
    outside = tmp_path / "outside"
    disk.path(digest(2)).rename(outside)
    disk.path(digest(2)).symlink_to(outside)
    assert load(disk, 2) is None
    assert outside.exists()


def test_other_tokens_or_another_blocks_file_are_a_miss(disk):
    stored(disk, 1, 2, 3)
    assert load(disk, 1, TOKENS[:-1] + (99,)) is None
    disk.path(digest(3)).replace(disk.path(digest(2)))
    assert load(disk, 2) is None


def test_another_models_blocks_are_no_use_and_are_removed(folder, disk):
    stored(disk, 1)
    old = disk.path(digest(1))
    disk.close()
    other = KVDisk(folder, OTHER_MODEL, SIZE)
    assert other.digests() == []
    assert not old.exists()
    assert load(other, 1) is None
    other.close()


def test_a_file_of_another_model_under_the_right_name_is_a_miss(tmp_path, disk):
    other = KVDisk(tmp_path / "other", OTHER_MODEL, SIZE)
    stored(other, 1)
    other.path(digest(1)).replace(disk.path(digest(1)))
    assert load(disk, 1) is None
    other.close()


def test_remains_of_a_cut_short_write_are_removed(disk):
    aside = disk.path(digest(1)).with_suffix(".part")
    aside.write_bytes(b"half")
    assert disk.digests() == []
    assert not aside.exists()


def test_removed_blocks_are_gone(disk):
    stored(disk, 1, 2)
    disk.remove(digest(1))
    stored(disk, 3)
    assert load(disk, 2) == payload(2)
    disk.close()
    assert not disk.path(digest(1)).exists()


def test_what_cannot_be_written_is_not_kept_and_harms_nothing(disk):
    disk.path(digest(1)).parent.rename(disk.path(digest(1)).parent.with_name("away"))
    disk.store(digest(1), TOKENS, payload(1))
    assert collect(disk, 1) == [DiskOutcome(digest(1), False, False)]
    assert load(disk, 1) is None


def test_waiting_writes_are_bounded(folder):
    disk = KVDisk(folder, MODEL, SIZE)
    held = disk._count_lock  # the thread cannot count down
    disk._num_stores = MAX_QUEUED_STORES
    assert held.acquire(timeout=1)
    held.release()
    assert not disk.store(digest(1), TOKENS, payload(1))
    disk.close()


def test_a_smaller_limit_takes_what_is_over_it_off_the_disk(folder, disk):
    stored(disk, 1, 2, 3)
    disk.close()
    smaller = KVDisk(folder, MODEL, SIZE)
    for seed in (1, 2, 3):
        os.utime(smaller.path(digest(seed)), ns=(seed, seed))
    assert smaller.keep_newest(2) == [digest(2), digest(3)]
    smaller.close()
    assert [smaller.path(digest(seed)).exists() for seed in (1, 2, 3)] == [False, True, True]


def test_a_folder_serves_one_worker_at_a_time(folder, disk):
    with pytest.raises(DiskInUse):
        KVDisk(folder, MODEL, SIZE)


def test_a_folder_that_others_may_enter_is_refused(folder):
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(ConfigError, match="kv_disk_dir .* 0700"):
        KVDisk(folder, MODEL, SIZE)


def test_a_file_in_the_folders_place_is_refused(folder):
    folder.write_text("")
    with pytest.raises(ConfigError, match="kv_disk_dir"):
        KVDisk(folder, MODEL, SIZE)


@pytest.mark.parametrize(
    ("number", "is_full"), [("ENOSPC", True), ("EDQUOT", True), ("EIO", False)]
)
def test_a_full_disk_is_told_from_other_faults_and_goes_on(
    disk, folder, monkeypatch, number, is_full
):
    """What could not be written leaves nothing; once there is room, the next one is."""
    stored(disk, 1)
    replace = os.replace

    def fail(*_):
        raise OSError(getattr(errno, number), "no")

    monkeypatch.setattr(os, "replace", fail)
    assert disk.store(digest(2), TOKENS, payload(2))
    assert collect(disk, 1) == [DiskOutcome(digest(2), False, False, disk_full=is_full)]
    monkeypatch.setattr(os, "replace", replace)
    disk.remove(digest(1))
    stored(disk, 3)
    assert disk.digests() == [digest(3)]
    assert load(disk, 3) == payload(3)
