"""The KV blocks: each new one takes the place of the oldest."""

from dataclasses import dataclass


@dataclass
class KVCacheBlock:
    block_id: int
    cached: bool = False


class BlockPool:
    def __init__(self, blocks: int) -> None:
        self.blocks = [KVCacheBlock(number) for number in range(blocks)]
        self._next = 1  # 0 is the placeholder

    def get_new_blocks(self, count: int) -> list[KVCacheBlock]:
        new = []
        for _ in range(count):
            block = self.blocks[self._next]
            self._next = self._next % (len(self.blocks) - 1) + 1
            self._maybe_evict_cached_block(block)
            block.cached = True
            new.append(block)
        return new

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        was, block.cached = block.cached, False
        return was
