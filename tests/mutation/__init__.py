"""Mutation testing: one-line defects in ``strategies/``, one at a time, and whether ``make test`` finds each.

    measure   runs each test file under coverage, so that each line knows the test files that reach it
    mutants   draws mutants with cosmic-ray's operators; pure functions
    runner    tests mutants in copies of the checkout
    report    writes what was found and what survived

``make mutation``, or ``python -m tests.mutation --seed 0 --count 60 --jobs 2``, after ``make coverage``. A run that was
interrupted goes on with the mutants that have no verdict yet.
"""
