"""The best path along a chain of candidate units, under the rows of a few moments.

- ``problem``: from candidates to a chain and back
- ``solver``: the best path under several limits, with a proven bound
- ``labels``: choices of repeated items, as sums that are not dominated
- ``linear_relaxation``: a lower bound, by column generation
- ``fitting``: a higher one, by the chains whose units fit beside their neighbours
"""
