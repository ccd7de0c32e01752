"""Where the KV of a request's positions came from. Pure arithmetic over (start, count) of each step."""

from dataclasses import dataclass

from sparseety.records import Phase


@dataclass(slots=True)
class Account:
    """Counts of positions of one request.

    Once the first token is sampled, prompt_len = cached + computed. Once the request has caught up after its last
    preemption, evicted = reused_again + recomputed. drafts = accepted + rejected.
    """

    prompt_len: int
    cached: int = 0  # prompt positions that were there before this request computed them
    computed: int = 0  # prompt positions computed, the first time
    evicted: int = 0  # positions whose KV was given up at preemptions
    reused_again: int = 0  # of these, there again when the request went on
    recomputed: int = 0  # of these, computed once more
    drafts: int = 0
    accepted: int = 0
    resumed: int = 0  # preemptions that it came back from
    _begun: bool = False
    _held: int = 0  # positions before this one have KV now
    _highest: int = 0  # positions before this one have had it

    def goes_on(self, start: int, known: int) -> bool:
        """A step that computed just the last known token, where the one before ended. If it did, that is counted."""
        if start != known - 1 or start != self._highest or start < self.prompt_len:
            return False
        self._highest = self._held = known
        return True

    def step(self, start: int, tokens: int, *, known: int, agreed: int, resumed: bool) -> Phase:
        """A step computed `tokens` positions from `start`, drafts included; returns what it did, mostly.

        known: prompt and output tokens before it; agreed: drafts accepted in it. Rejected drafts leave no position.
        Under async scheduling a start may be guessed too high by drafts rejected since: no step starts after the last
        known token.
        """
        start = min(start, known - 1)
        if resumed and self._begun:
            self.resumed += 1
            self.evicted += self._held
            self.reused_again += min(start, self._highest)
        if start > self._highest:
            self.cached += min(start, self.prompt_len) - min(self._highest, self.prompt_len)
            self._highest = start
        self._begun = True
        end = min(start + tokens, known + agreed)
        again = max(0, min(self._highest, end) - start)
        prompt = max(0, min(end, self.prompt_len) - max(self._highest, start))
        self.recomputed += again
        self.computed += prompt
        self._highest, self._held = max(self._highest, end), end
        return "recomputed" if again else "prefill" if prompt else "decode"

    def ended(self, preemptions: int) -> None:
        """Preempted and never scheduled again, it gave up what it held."""
        if preemptions > self.resumed:
            self.evicted += self._held
            self._held = 0
