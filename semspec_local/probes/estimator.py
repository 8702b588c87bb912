"""A fitted scikit-learn pipeline as a probe's arrays. Looks at its attributes; scikit-learn itself is not imported."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..errors import ProbeError
from .mlp import Activation, Mlp

_HIDDEN: dict[str, Activation] = {"relu": "relu", "tanh": "tanh", "logistic": "sigmoid"}
_LINEAR = ("LinearRegression", "Ridge", "RidgeCV", "Lasso", "LassoCV", "ElasticNet", "ElasticNetCV")
_LOGISTIC = ("LogisticRegression", "LogisticRegressionCV")
_WANTED = (
    "wanted a StandardScaler (or none) and an MLPClassifier, MLPRegressor, LogisticRegression or a linear regression"
)


def mlp_from_estimator(estimator: Any) -> Mlp:
    """The probe that a fitted estimator or pipeline computes.

    A classifier's probability of its second class counts; a regressor's result is clipped to [0, 1].
    Raises ProbeError for anything else, and for an estimator that was not fitted.
    """
    steps = [step for _, step in getattr(estimator, "steps", [("", estimator)]) if step not in (None, "passthrough")]
    *before, model = steps or [None]
    names = [type(step).__name__ for step in before]
    if names not in ([], ["StandardScaler"]):
        raise ProbeError(f"the pipeline begins with {', '.join(names)}; {_WANTED}")
    try:
        layers, activation, sigmoid = _model_parts(model)
    except AttributeError:
        raise ProbeError(f"this {type(model).__name__} is not fitted, or of another kind; {_WANTED}") from None
    n_embd = layers[0][0].shape[0]
    mean, std = np.zeros(n_embd), np.ones(n_embd)
    if before:
        mean = np.asarray(before[0].mean_) if before[0].with_mean else mean  # mean_ is there in either case
        std = np.asarray(before[0].scale_) if before[0].with_std else std
    return Mlp(layers=layers, mean=mean, std=std, activation=activation, sigmoid=sigmoid)


def _model_parts(model: Any) -> tuple[list[tuple[Any, Any]], Activation, bool]:
    """Layers, the activation between them, and whether a sigmoid is at the end."""
    classes = getattr(model, "classes_", None)
    if classes is not None and len(classes) != 2:
        raise ProbeError(f"the classifier has {len(classes)} classes; wanted 2")
    name = type(model).__name__
    if name in ("MLPClassifier", "MLPRegressor"):
        if model.out_activation_ not in ("logistic", "identity"):
            raise ProbeError(f"the last activation is {model.out_activation_!r}; wanted logistic or identity")
        if model.activation not in _HIDDEN:
            raise ProbeError(f"the activation is {model.activation!r}; wanted {', '.join(_HIDDEN)}")
        layers = list(zip(map(np.asarray, model.coefs_), map(np.asarray, model.intercepts_)))
        return layers, _HIDDEN[model.activation], model.out_activation_ == "logistic"
    if name not in (*_LINEAR, *_LOGISTIC) or getattr(model, "multi_class", "") == "multinomial":
        raise ProbeError(f"the pipeline ends with {name}; {_WANTED}")
    weights = np.asarray(model.coef_).reshape(1, -1).T
    return [(weights, np.asarray(model.intercept_, np.float64).reshape(-1))], "relu", name in _LOGISTIC
