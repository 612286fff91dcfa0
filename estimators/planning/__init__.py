"""How a deployment should be built: questions asked once, on paper, before any request arrives.

One module for each subject: plain frozen dataclasses in, dataclasses and arrays out. Nothing here runs while requests
are routed, so a reader's understanding comes before speed. Shapes, cards and rates are those of the online estimators.
`tfirst calc` shows each of them; its side, `router/cli/calc/`, holds inputs, tables and figures and no arithmetic.
"""
