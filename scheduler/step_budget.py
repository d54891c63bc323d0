"""How the token budget of one step is shared among the running sequences."""

from collections.abc import Mapping
from collections.abc import Sequence as Many

from shoal.scheduler.images import image_cut_by
from shoal.scheduler.sequence import Sequence
from shoal.scheduler.step_pace import StepPace

# Parts of a step's budget. A yielding prefill takes small portions, so that a step is over soon
# when somebody's urgent prompt comes; beside urgent ones the others still get a little.
_YIELDING_SHARE = 3 / 16
_BESIDE_URGENT_SHARE = 1 / 16
# However short steps should be, so many rows are computed for one reading of the weights, and so
# many prompt tokens, or a prompt beside many decodes would never end.
_LEAST_ROWS = 32
_LEAST_PREFILL = 16
# Products are about as fast a row with this many as with more: rows of a step where a prompt is
# urgent, or more sequences wait for a first token than decode.
_FULL_ROWS = 128
_MOST_WAITING = 4.0  # what waiting prompts weigh at most against decodes; an urgent one does
_WEIGHT_OF_PROMPT = 8  # decodes that a waiting prompt is weighed against


def share_budget(
    members: Many[Sequence],
    budget: int,
    pace: StepPace,
    decode_stretch: float,
    have_waited: bool = True,
) -> dict[int, int]:
    """Tokens to run by seq_id, of ``members`` in arrival order.

    A sequence that lacks one token (decode) gets it. The others share what is left, or less where
    decodes should not be held up: see ``_most_prefill``. Urgent prefills go first; beside them the
    others get a little where they had to wait in the step before (``have_waited``), else nothing.
    """
    num_tokens: dict[int, int] = {}
    prefills: list[Sequence] = []
    for sequence in members:
        count = sequence.num_runnable_tokens
        if count == 1:
            num_tokens[sequence.seq_id] = 1
        elif count > 1:
            prefills.append(sequence)
    if not prefills:
        return num_tokens
    left = min(budget - len(num_tokens), _most_prefill(members, pace, decode_stretch))
    urgent = [s for s in prefills if s.urgency > 0]
    others = [s for s in prefills if s.urgency <= 0]
    if urgent and others:
        portion = max(1, int(left * _BESIDE_URGENT_SHARE)) if have_waited else 0
        used = _grant_urgent(num_tokens, urgent, left - portion)
        _grant(num_tokens, others, min(left - used, portion))
    elif urgent:
        _grant_urgent(num_tokens, urgent, left)
    else:
        if any(s.urgency < 0 for s in others):
            portion = int(budget * _YIELDING_SHARE / _work_of_token(others, pace))
            portion = max(1, portion, pace.tokens_of_base)
            left = min(left, portion)
        _grant(num_tokens, prefills, left)
    _keep_images_whole(num_tokens, prefills, budget)
    return {seq_id: count for seq_id, count in num_tokens.items() if count}


def some_wait(members: Many[Sequence], num_tokens: Mapping[int, int]) -> bool:
    """Whether such a step gives nothing to the prompts that are not urgent, beside one that is."""
    prefills = [s for s in members if s.num_runnable_tokens > 1]
    others = [s for s in prefills if s.urgency <= 0]
    return 0 < len(others) < len(prefills) and not any(s.seq_id in num_tokens for s in others)


def _keep_images_whole(num_tokens: dict[int, int], prefills: Many[Sequence], budget: int) -> None:
    """Move the end of a portion that lies inside an image to where the image begins or ends.

    The first of the prefills gets all of its image, if need be in place of others' portions, and
    even beyond a budget that is short for want of memory; so no image waits for ever.
    """
    left = budget - sum(num_tokens.values())
    for sequence in prefills:
        if not sequence.images:
            continue
        granted = num_tokens.get(sequence.seq_id, 0)
        start = sequence.num_computed_tokens
        image = image_cut_by(sequence.images, start + granted)
        if image is None:
            continue
        count = max(0, image.start - start)
        if not count:
            whole = image.stop - start
            if sequence is prefills[0]:
                left += _take_back(num_tokens, sequence, whole - granted - left)
            if whole - granted <= left or sequence is prefills[0]:
                count = whole
        num_tokens[sequence.seq_id] = count
        left += granted - count


def _take_back(num_tokens: dict[int, int], keeper: Sequence, wanted: int) -> int:
    """Take at least ``wanted`` tokens of other sequences, the last ones first; how many it was."""
    taken = 0
    for seq_id in reversed(list(num_tokens)):
        if taken >= wanted:
            break
        if seq_id != keeper.seq_id:
            taken += num_tokens.pop(seq_id)
    return taken


def _grant_urgent(num_tokens: dict[int, int], urgent: Many[Sequence], budget: int) -> int:
    """As ``_grant``, but as many of the first ones as can end in this step do, whatever comes
    behind them: of two that share what is enough for one, both would end in the next."""
    left = budget
    for index, sequence in enumerate(urgent):
        lacks = sequence.num_runnable_tokens
        if lacks > left:
            return budget - left + _grant(num_tokens, urgent[index:], left)
        num_tokens[sequence.seq_id] = lacks
        left -= lacks
    return budget - left


def _grant(num_tokens: dict[int, int], prefills: Many[Sequence], budget: int) -> int:
    """Share ``budget`` among prefills in arrival order; returns what was used.

    Half goes to those with the fewest tokens to go, so a short prompt never waits behind a long
    one; the rest goes in arrival order, so a long prompt never starves behind short ones.
    """
    lacking = {s.seq_id: s.num_runnable_tokens for s in prefills}
    left = budget
    quick = budget // 2  # rounded down: arrival order wins the last token
    for seq_id in sorted(lacking, key=lacking.__getitem__):
        grant = min(lacking[seq_id], quick)
        num_tokens[seq_id] = grant
        quick -= grant
        left -= grant
    for seq_id, lacks in lacking.items():
        grant = min(lacks - num_tokens[seq_id], left)
        num_tokens[seq_id] += grant
        left -= grant
    return budget - left


def _most_prefill(members: Many[Sequence], pace: StepPace, decode_stretch: float) -> int:
    """Prefill tokens of a step that is as short as the decodes in it want; all, without decodes.

    A decode with a ``tpot_s`` wants no longer step. To the others prompts may add
    ``decode_stretch - 1`` times what the decodes take alone, and up to four times as much where one
    waits for its first token for every eight that decode, or more, so that neither side waits much
    longer than the other; and where one is urgent. How fast steps are decides only when a token is
    computed, never what it is.
    """
    decodes = [s for s in members if s.num_runnable_tokens == 1]
    if not decodes:
        return sum(s.num_runnable_tokens for s in members)
    least_rows = _LEAST_ROWS
    waiting = [s for s in members if s.num_runnable_tokens > 1 and s.urgency >= 0]
    weight = min(_MOST_WAITING, max(1.0, _WEIGHT_OF_PROMPT * len(waiting) / len(decodes)))
    if any(s.urgency > 0 for s in waiting):
        weight, least_rows = _MOST_WAITING, _FULL_ROWS
    elif len(waiting) > len(decodes) and all(s.tpot_s is None for s in decodes):
        least_rows = _FULL_ROWS
    usual = pace.seconds(len(decodes)) * (1 + (decode_stretch - 1) * weight)
    seconds = min(usual if s.tpot_s is None else s.tpot_s for s in decodes)
    prefills = [s for s in members if s.num_runnable_tokens > 1]
    most = pace.prompt_work_in(seconds, len(decodes)) / _work_of_token(prefills, pace)
    whole = sum(s.num_runnable_tokens for s in prefills)
    return max(int(min(most, whole)), least_rows - len(decodes), _LEAST_PREFILL)


def _work_of_token(prefills: Many[Sequence], pace: StepPace) -> float:
    """Of the mean of them."""
    return pace.work_of_token(sum(s.num_held_tokens for s in prefills) // max(1, len(prefills)))
