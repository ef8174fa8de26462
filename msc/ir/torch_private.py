"""Every private name of torch that MSC uses; no other module may touch one.

Private names change without notice. Each stands here with the reason why no public name will do;
`tests/test_torch_private.py` holds the rest of the source to this. Tested with torch 2.13.
"""
