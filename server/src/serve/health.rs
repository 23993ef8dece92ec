//! `/health`, `/ready` and `/v1/models`: is the process well, can a token be made, and what is served.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::errors::ApiError;
use super::state::{App, Model, Phase};

/// GET `/health`: the process. It is well while weights are read, and while it stops.
pub(crate) async fn health(State(app): State<Arc<App>>) -> Response {
    let phase = app.phase();
    let mut body = json!({
        "status": "ok",
        "phase": phase.word(),
        "version": env!("CARGO_PKG_VERSION"),
        "config_hash": app.settings.config_hash,
        "started": app.started,
        "pid": std::process::id(),
    });
    let mut status = StatusCode::OK;
    if let Phase::Failed(why) = phase {
        status = StatusCode::SERVICE_UNAVAILABLE;
        body["status"] = "failed".into();
        body["reason"] = why.into();
    }
    answer(status, &body)
}

/// GET `/ready`: whether a token can be made.
pub(crate) async fn ready(State(app): State<Arc<App>>) -> Response {
    let phase = app.phase();
    let status = if phase == Phase::Ready { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    answer(status, &json!({ "status": phase.word() }))
}

/// GET `/metrics`.
pub(crate) async fn metrics(State(app): State<Arc<App>>) -> Response {
    super::metrics::answer(&app)
}

/// GET `/v1/models`: the one model, once it can be asked.
pub(crate) async fn models(State(app): State<Arc<App>>) -> Result<Response, ApiError> {
    let list = json!({ "object": "list", "data": [card(&app, app.model()?)] });
    Ok(answer(StatusCode::OK, &list))
}

/// GET `/v1/models/NAME`. A name may have slashes.
pub(crate) async fn model(
    State(app): State<Arc<App>>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    let card = card(&app, app.model()?);
    let name = name.map_or_else(|_| "?".to_owned(), |Path(name)| name);
    match name == app.settings.served_name {
        true => Ok(answer(StatusCode::OK, &card)),
        false => Err(ApiError::unknown_model(&name, &app.settings.served_name)),
    }
}

fn card(app: &App, model: &Model) -> Value {
    json!({
        "id": app.settings.served_name,
        "object": "model",
        "created": app.started,
        "owned_by": "roundhouse",
        "max_model_len": model.context,
    })
}

fn answer(status: StatusCode, body: &Value) -> Response {
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    // Who is not ready may be asked again soon.
    if status == StatusCode::SERVICE_UNAVAILABLE {
        headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
    }
    (status, headers, body.to_string()).into_response()
}
