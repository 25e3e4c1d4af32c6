"""Graph passes: small rules that make a traced graph fast. Each file holds one, with `apply(model) -> number of places changed`.

A rule that does not find its pattern leaves the graph as it is, so an unknown model is slower, never wrong. What every rule
computes is the same as before up to rounding; tests compare each against the untouched graph.
"""
