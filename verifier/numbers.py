"""A set of numbers that mostly follow each other, in memory by the number of its holes. Pure."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator


class Numbers:
    def __init__(self, spans: Iterable[tuple[int, int]] = ()) -> None:
        self._first = [first for first, _ in spans]  # of each span, ascending
        self._last = [last for _, last in spans]

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._first, number) - 1
        return index >= 0 and number <= self._last[index]

    def __bool__(self) -> bool:
        return bool(self._first)

    def add(self, number: int) -> bool:
        """False: it was there already."""
        first, last = self._first, self._last
        index = bisect_right(first, number) - 1
        if index >= 0 and number <= last[index]:
            return False
        joins_before = index >= 0 and last[index] == number - 1
        joins_after = index + 1 < len(first) and first[index + 1] == number + 1
        if joins_before and joins_after:
            last[index] = last[index + 1]
            del first[index + 1], last[index + 1]
        elif joins_before:
            last[index] = number
        elif joins_after:
            first[index + 1] = number
        else:
            first.insert(index + 1, number)
            last.insert(index + 1, number)
        return True

    def spans(self) -> list[tuple[int, int]]:
        """(first, last) of each run of numbers without a hole, ascending."""
        return list(zip(self._first, self._last, strict=True))

    def without(self, numbers: Iterable[int]) -> list[tuple[int, int]]:
        """The spans of what is left less these."""
        left: list[tuple[int, int]] = []
        out = sorted(numbers, reverse=True)
        for begin, last in self.spans():
            while out and out[-1] < begin:
                out.pop()
            while out and out[-1] <= last:
                number = out.pop()
                if begin < number:
                    left.append((begin, number - 1))
                begin = number + 1
            if begin <= last:
                left.append((begin, last))
        return left

    def missing(self, first: int | None) -> Iterator[int]:
        """Numbers that are not here, between those that are; from `first` on, where it is given."""
        due = first
        for begin, last in self.spans():
            yield from range(begin if due is None else due, begin)
            due = last + 1
