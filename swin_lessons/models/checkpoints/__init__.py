"""Other people's weights, step by step.

`files` turns bytes into tensors, `layouts` their names into ours, `resize` their shapes, `windows` knows
what they were trained with, `plan` decides before anything changes, `report` says what was done,
`hub` fetches files.
"""
