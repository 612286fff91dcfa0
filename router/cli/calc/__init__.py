"""`tfirst calc`: calculators on paper. Inputs, tables and figures are here, arithmetic in `estimators/planning/`."""
