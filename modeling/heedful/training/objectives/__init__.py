"""What a recipe may ask of training besides the cross-entropy: R-Drop, SimCut, distillation, other optimizers."""
