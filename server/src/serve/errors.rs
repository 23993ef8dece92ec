//! What a client is told when it does not get what it asked for: one body for every status.

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;

/// An error of the wire. Says what was wrong, where, and what to do next.
#[derive(Debug)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    kind: &'static str,
    code: &'static str,
    param: Option<String>,
    pub(crate) message: String,
    retry_after_s: Option<u64>,
    /// Whether the connection cannot be used any more.
    close: bool,
}

#[derive(Serialize)]
struct Body<'a> {
    error: Inner<'a>,
}

#[derive(Serialize)]
struct Inner<'a> {
    message: &'a str,
    #[serde(rename = "type")]
    kind: &'a str,
    param: Option<&'a str>,
    code: &'a str,
}

/// Longest name of a field that is repeated in an answer.
const NAME_CHARS: usize = 80;

impl ApiError {
    fn new(
        status: StatusCode,
        kind: &'static str,
        code: &'static str,
        message: impl Into<String>,
    ) -> ApiError {
        let message = message.into();
        ApiError { status, kind, code, param: None, message, retry_after_s: None, close: false }
    }

    /// The caller's fault, with a status of its own.
    pub(crate) fn refused(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(status, "invalid_request_error", code, message)
    }

    /// A field that cannot be honoured, by its dotted path.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        let param = short(&param.into());
        let message = format!("{param}: {}", message.into());
        let error = ApiError::refused(StatusCode::BAD_REQUEST, "invalid_value", message);
        ApiError { param: Some(param), ..error }
    }

    /// A field that the wire does not know.
    pub(crate) fn unknown_field(param: impl Into<String>, known: &str) -> ApiError {
        let param = short(&param.into());
        let message = format!("{param}: there is no such field; correct or remove it (there are: {known})");
        let error = ApiError::refused(StatusCode::BAD_REQUEST, "unknown_field", message);
        ApiError { param: Some(param), ..error }
    }

    /// A body that is not the JSON that it must be.
    pub(crate) fn json(message: impl Into<String>, param: Option<String>) -> ApiError {
        ApiError { param, ..ApiError::refused(StatusCode::BAD_REQUEST, "invalid_json", message) }
    }

    pub(crate) fn unauthorised(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::UNAUTHORIZED, "authentication_error", "invalid_api_key", message)
    }

    pub(crate) fn unknown_model(asked: &str, served: &str) -> ApiError {
        let message = format!("there is no model `{}`; this server has `{served}`", short(asked));
        let error = ApiError::refused(StatusCode::NOT_FOUND, "model_not_found", message);
        ApiError { param: Some("model".into()), ..error }
    }

    /// Too much is under way already.
    pub(crate) fn full(message: impl Into<String>) -> ApiError {
        let kind = "rate_limit_error";
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, kind, "queue_full", message);
        ApiError { retry_after_s: Some(1), ..error }
    }

    /// Not now: loading, stopping, or broken.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", code, message);
        ApiError { retry_after_s: Some(5), ..error }
    }

    /// Our fault.
    pub(crate) fn failed(code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", code, message)
    }

    /// The same, and the connection ends after it.
    pub(crate) fn closing(self) -> ApiError {
        ApiError { close: true, ..self }
    }

    /// The body.
    pub(crate) fn to_json(&self) -> String {
        let ApiError { kind, code, param, message, .. } = self;
        let error = Inner { message, kind, param: param.as_deref(), code };
        serde_json::to_string(&Body { error }).expect("strings can be written")
    }

    /// A whole answer, for a connection on which no request could be read.
    pub(crate) fn to_http(&self) -> String {
        let body = self.to_json();
        format!(
            "HTTP/1.1 {}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
            self.status,
            body.len()
        )
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let json = HeaderValue::from_static("application/json");
        let mut response = (self.status, [(header::CONTENT_TYPE, json)], self.to_json()).into_response();
        let headers = response.headers_mut();
        if let Some(seconds) = self.retry_after_s {
            headers.insert(header::RETRY_AFTER, seconds.into());
        }
        if self.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if self.close {
            headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response
    }
}

/// A text that a client chose, cut to what an answer should repeat.
pub(crate) fn short(name: &str) -> String {
    match name.char_indices().nth(NAME_CHARS) {
        Some((at, _)) => format!("{}...", &name[..at]),
        None => name.to_owned(),
    }
}

/// A sentence in which names may be that a client chose, cut to its two ends: its end says what is wrong, and where.
pub(crate) fn short_middle(text: &str) -> String {
    let mut cuts = text.char_indices().map(|(at, _)| at);
    match (cuts.nth(NAME_CHARS), cuts.nth_back(NAME_CHARS)) {
        (Some(start), Some(end)) => format!("{}...{}", &text[..start], &text[end..]),
        _ => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn every_error_has_the_same_body() {
        let error = ApiError::field("stop[3]", "is empty");
        let body: Value = serde_json::from_str(&error.to_json()).unwrap();
        let expected = json!({"error": {
            "message": "stop[3]: is empty", "type": "invalid_request_error", "param": "stop[3]", "code": "invalid_value"
        }});
        assert_eq!(body, expected);
    }

    #[test]
    fn a_giant_name_is_not_repeated_whole() {
        let error = ApiError::unknown_field("ü".repeat(100_000), "model");
        assert!(error.to_json().len() < 600);
    }

    #[test]
    fn a_giant_name_inside_a_sentence_leaves_its_ends() {
        let sentence = format!("{} is there twice at line 1 column 5", "ü".repeat(100_000));
        let cut = short_middle(&sentence);
        assert!(cut.starts_with("üü") && cut.ends_with("ü is there twice at line 1 column 5"), "{cut}");
        assert!(cut.chars().count() < 200);
        let longest = "ü".repeat(2 * NAME_CHARS);
        assert_eq!(short_middle(&longest), longest);
    }
}
