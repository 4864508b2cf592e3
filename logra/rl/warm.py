"""Imported once by the server that workers are forked from: the first expression costs a hundred times a later one (grammars, caches)."""

from logra.rl import verifiers

verifiers.equal(r"\frac{1}{2}", "0.5")
verifiers.equal("(1,2]", "x=5")
