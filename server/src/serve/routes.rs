//! Which path leads where, and what stands around it.

use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::http::{HeaderName, Method, StatusCode, Uri, header};
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use tower_http::cors::{AllowHeaders, AllowOrigin, Any, CorsLayer};

use super::errors::{ApiError, short};
use super::state::App;
use super::{edge, health, replies};

/// All routes.
pub(crate) fn router(app: &Arc<App>) -> Router {
    let all = Router::new()
        .route("/v1/chat/completions", post(replies::chat))
        .route("/v1/completions", post(replies::completions))
        .route("/tokenize", post(replies::tokenize))
        .route("/detokenize", post(replies::detokenize))
        .route_layer(from_fn_with_state(app.clone(), edge::with_json))
        .route("/v1/models", get(health::models))
        .route("/v1/models/{*name}", get(health::model))
        .route("/health", get(health::health))
        .route("/ready", get(health::ready))
        .route("/metrics", get(health::metrics))
        .fallback(unknown)
        .method_not_allowed_fallback(wrong_method)
        .with_state(app.clone())
        // Bodies are limited by the edge, which reads them.
        .layer(DefaultBodyLimit::disable())
        .layer(from_fn_with_state(app.clone(), edge::with_key))
        .layer(from_fn_with_state(app.clone(), edge::around));
    match app.settings.cors_origins.as_slice() {
        [] => all,
        origins => all.layer(cors(origins)),
    }
}

async fn unknown(uri: Uri) -> ApiError {
    let why = format!(
        "there is nothing at {}; see /v1/models, /v1/chat/completions and /v1/completions",
        short(uri.path())
    );
    ApiError::refused(StatusCode::NOT_FOUND, "unknown_route", why)
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let (path, method) = (short(uri.path()), short(method.as_str()));
    let why = format!("{path} does not take {method}; the Allow header says what it takes");
    ApiError::refused(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", why)
}

/// Lets pages of these origins call.
fn cors(origins: &[String]) -> CorsLayer {
    let origin = match origins.iter().any(|origin| origin == "*") {
        true => AllowOrigin::from(Any),
        false => AllowOrigin::list(origins.iter().filter_map(|origin| origin.parse().ok())),
    };
    CorsLayer::new()
        .allow_origin(origin)
        .allow_methods([Method::GET, Method::POST])
        // Official clients send headers of their own, other ones in every version.
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers([HeaderName::from_static("x-roundhouse-ignored"), header::RETRY_AFTER])
}
