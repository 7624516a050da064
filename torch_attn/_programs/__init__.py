"""Functions of the pair: what the kernels run in place of a score_mod or a mask_mod.

Each module imports only modules above it:

- limits: the least and the largest result of an operation on whole numbers.
- value: what a traced value is.
- errors: refuses a function, and says in which line of the user's code.
- list: the list of operations, and the text that it becomes.
- rules: writes PyTorch's functions into the list. A new operation is a rule.
- tensors: the tensors that a function captures or makes.
- values: computes values: vectors by PyTorch, values of the pair by the rules.
- functions: what is known about PyTorch's functions.
- general: calls functions of vectors that are not elementwise.
- tables: indexes captured and computed tensors.
- trace: runs a function and sees its calls of PyTorch.
- program: the entry: from two functions to texts and tensors.
"""
