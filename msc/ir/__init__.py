"""The intermediate representation: meshes, placements, typed graphs, ops, actions, passes.

Imports nothing else of MSC.
"""
