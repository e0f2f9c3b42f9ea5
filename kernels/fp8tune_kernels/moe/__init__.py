"""A mixture-of-experts layer as one differentiable operation, and the kernels that order, gather and sum its rows.

M = T * top_k rows lie in the order of their experts: row r belongs to token ``token_of_row[r]``, and token t's k-th
choice is row ``row_of[t, k]``. Values are cast and gathered per token, not per row.
"""
