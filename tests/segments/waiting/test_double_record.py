"""Records of which one of two is always whole."""

from distdl_rma.segments.waiting.double_record import DoubleRecord

RECORD = DoubleRecord("q8s", 16)


def written(*fields):
    memory, calls = bytearray(RECORD.end + 8), []
    for count, number in enumerate(fields, 1):
        RECORD.write(memoryview(memory), count, lambda: calls.append(1), number, b"words")
    assert len(calls) == len(fields)
    return memory


def test_the_newest_record_is_read_and_nothing_else_is_touched():
    for last in range(1, 6):
        memory = written(*range(10, 10 + last))
        assert RECORD.read(bytes(memory)) == (9 + last, b"words\0\0\0")
        assert not any(memory[:16]) and not any(memory[RECORD.end :])


def test_while_one_record_changes_the_one_before_it_is_whole():
    memory = written(1, 2)
    after = written(1, 2, 3)
    changed = [k for k in range(len(memory)) if memory[k] != after[k]]
    for k in changed[:-1]:
        memory[k] = after[k]
        assert RECORD.read(bytes(memory)) == (2, b"words\0\0\0")
    memory[changed[-1]] = after[changed[-1]]
    assert RECORD.read(bytes(memory)) == (3, b"words\0\0\0")


def test_zeros_are_no_record():
    assert RECORD.read(bytes(RECORD.end)) is None
