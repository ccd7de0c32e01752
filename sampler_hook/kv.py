"""Which request a KV block belongs to, and which of its positions it holds. Pure: block numbers in, records out."""

from collections.abc import Iterable, Sequence

from sparseety.records import KvBlocks

_NULL = 0  # vLLM's placeholder for positions that a window has left behind


class KvLedger:
    """Follows the block tables of all requests of one engine."""

    def __init__(self, block_sizes: Sequence[int]) -> None:
        """block_sizes: tokens of a block, by KV cache group."""
        self._sizes = list(block_sizes)
        self._held: dict[int, list[int]] = {}  # request -> blocks it has had so far, by group
        self._content: dict[int, tuple[int, int, int]] = {}  # block -> (request, group, first position)

    def given(self, request: int, start: int, blocks: Sequence[Sequence[int]], *, anew: bool) -> list[KvBlocks]:
        """A request was given blocks, by group. anew: they are its whole table, those before `start` found cached."""
        if anew or request not in self._held:
            self._held[request] = [0] * len(blocks)
        held = self._held[request]
        events = []
        for group, numbers in enumerate(blocks):
            size = self._sizes[min(group, len(self._sizes) - 1)]
            cached = min(len(numbers), start // size) if anew else 0
            events += self._runs("reused", request, group, size, 0, numbers[:cached])
            first = held[group] + cached
            allocated = numbers[cached:]
            for place, number in enumerate(allocated):
                if number != _NULL:
                    self._content[number] = (request, group, (first + place) * size)
            events += self._runs("allocated", request, group, size, first, allocated)
            held[group] += len(numbers)
        return events

    def _runs(
        self, kind: str, request: int, group: int, size: int, first: int, numbers: Sequence[int]
    ) -> list[KvBlocks]:
        """One record for each run of blocks without a placeholder between."""
        found: list[KvBlocks] = []
        run: list[int] = []
        for place, number in enumerate([*numbers, _NULL]):
            if number != _NULL:
                run.append(number)
            elif run:
                at = (first + place - len(run)) * size
                tokens = len(run) * size
                found.append(
                    KvBlocks(kind=kind, first=at, tokens=tokens, blocks=run, request=request, group=group)  # type: ignore[arg-type]
                )
                run = []
        return found

    def evicted(self, numbers: Iterable[int]) -> list[KvBlocks]:
        """The cached content of blocks was given up for others."""
        events = []
        for number in numbers:
            request, group, first = self._content.pop(number, (None, 0, 0))
            size = self._sizes[min(group, len(self._sizes) - 1)]
            events.append(
                KvBlocks(kind="evicted", first=first, tokens=size, blocks=[number], request=request, group=group)
            )
        return events

    def preempted(self, request: int) -> list[KvBlocks]:
        """A request gave up its whole table. What is cached of it may be found again."""
        held = self._held.pop(request, [])
        return [
            KvBlocks(
                kind="preempted",
                first=0,
                tokens=count * self._sizes[min(group, len(self._sizes) - 1)],
                blocks=[],
                request=request,
                group=group,
            )
            for group, count in enumerate(held)
            if count
        ]

    def ended(self, request: int) -> None:
        self._held.pop(request, None)
