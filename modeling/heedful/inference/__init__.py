<<<<<<< ours
"""Text in, text out: a saved model is loaded, one of three engines searches, scores are computed."""
||||||| base
"""inference."""
=======
"""Text in, text out: loading a trained model, translating with one of three engines, and seeing its attention."""
>>>>>>> theirs
