"""Members that lie: each lie is once written around a seam of the liar's own, for whole swarms in one process, as a
program that the worlds of chaos start, and as a fault. The product knows nothing of it.
"""
