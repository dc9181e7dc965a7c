"""Operations: functions of tensors, independent of specs, backends and metadata objects.

`ops.torch` and `ops.triton` are counterparts: modules with the same name define the same function
with the same signature, and the conformance suite compares their results. `params.AttentionParams`
holds the parameters that all attention operations share.
"""
