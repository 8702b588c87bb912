"""The target's rating of a step (arXiv 2504.07891): what it is asked, and how its answer is read.

The question stands behind the step as plain text, not as a turn of the chat template: no control token is made, what is
in the cache stays as it is, and models without a template can be asked too. Knows nothing of thresholds.
"""

from __future__ import annotations

import math

from .errors import ConfigError
from .protocols import StepModel, Vocabulary

# It ends with a line break, since a space would be part of the digit's token in some vocabularies.
RATING_PROMPT = (
    "\n[Check of the step just above: are its facts and its arithmetic right, and does it bring the answer nearer? "
    "Mark from 0 (wrong or useless) to 9 (right and useful), one digit:]\n"
)


class Rater:
    """Asks a model of one vocabulary to rate the last step in its cache; ConfigError if that vocabulary cannot answer.

    The rating is the digit with the highest logit, as the paper's code takes it by default, not the mean over all ten:
    its threshold of 7 is one of digits, and a mean is pulled to the middle by models that are not sure. The digit is
    not sampled, so a rating takes one pass, and no random number.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.prompt = vocabulary.encode(RATING_PROMPT)
        self._digits = [self._token(vocabulary, digit) for digit in "0123456789"]
        if len(set(self._digits)) < len(self._digits):
            raise _no_digits("the same token for two digits")

    def _token(self, vocabulary: Vocabulary, digit: str) -> int:
        *before, token = vocabulary.encode(RATING_PROMPT + digit)
        if before != self.prompt:
            raise _no_digits(f"no token that is {digit} alone")
        return token

    def rate(self, model: StepModel) -> float:
        """The rating, 0 to 9, of the step at the end of the cache, which is left as it was; NaN if logits are none.

        Of equally likely digits the lowest counts. The context must have room for `prompt`.
        """
        logits = model.peek(self.prompt)[self._digits]
        return float(logits.argmax()) if math.isfinite(logits.max()) else math.nan


def _no_digits(found: str) -> ConfigError:
    return ConfigError(
        f"the target's vocabulary has {found}; wanted one token for each digit, off which its rating of a step is "
        "read. Use a policy that asks for no rating, such as mean-loglik"
    )
