"""What a request asks for, as far as its placement needs it."""

from router.prompts.reader import PromptReader
from router.prompts.sizes import LONGEST_GUESS_TOKENS, CharactersPerToken

__all__ = ["LONGEST_GUESS_TOKENS", "CharactersPerToken", "PromptReader"]
