"""One rig a layer: what the tests of a layer build their scenes of, all of it imported from the layer's own module.

A rig stands on those of the layers below it, and all of them on :mod:`tests.harness.rigs.common` and
:mod:`tests.harness.rigs.clocks`, which the rigs hand on. ``tests/README.md`` says which layer has which.
"""
