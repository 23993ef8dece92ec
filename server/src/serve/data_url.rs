//! Data URLs: pictures that lie in the request itself.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use vision::PictureError;

use super::errors::short;

/// The bytes of a picture of at most `most` bytes.
///
/// # Errors
/// Links, other kinds of data, and base64 that does not follow RFC 4648 to the letter. The data itself is not repeated.
pub(crate) fn bytes(url: &str, most: usize) -> Result<Vec<u8>, String> {
    const WANTED: &str = "send the picture itself, as data:image/png;base64,...";
    let Some((scheme, rest)) = url.split_once(':') else {
        return Err(format!("is no URL; {WANTED}"));
    };
    if !scheme.eq_ignore_ascii_case("data") {
        return Err(format!("is a link ({}:), and links are not followed here; {WANTED}", short(scheme)));
    }
    let Some((head, data)) = rest.split_once(',') else {
        return Err(format!("is a data URL without a comma; {WANTED}"));
    };
    let mut head = head.split(';').map(str::trim);
    let kind = head.next().unwrap_or_default();
    if !kind.get(..6).is_some_and(|start| start.eq_ignore_ascii_case("image/")) {
        let kind = if kind.is_empty() { "text/plain" } else { kind };
        return Err(format!("holds data of type {}, not image/...; {WANTED}", short(kind)));
    }
    if !head.next_back().is_some_and(|word| word.eq_ignore_ascii_case("base64")) {
        return Err(format!("is not base64; {WANTED}"));
    }
    let least = (data.len() / 4).saturating_sub(1) * 3;
    if least > most {
        return Err(PictureError::Bytes { bytes: least, limit: most }.to_string());
    }
    STANDARD
        .decode(data)
        .map_err(|error| format!("is not base64 of whole bytes, without spaces or line breaks: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_is_in_the_url() {
        for url in [
            "data:image/png;base64,AAEC",
            "DATA:IMAGE/PNG;BASE64,AAEC",
            "data:image/png;charset=utf-8; base64,AAEC",
            "data:image/anything;base64,AAEC",
        ] {
            assert_eq!(bytes(url, 3).unwrap(), [0, 1, 2], "{url}");
        }
        assert!(bytes("data:image/png;base64,", 3).unwrap().is_empty());
    }

    #[test]
    fn what_is_no_picture_in_a_url_is_refused_for_what_it_is() {
        for (url, words) in [
            ("", "no URL"),
            ("cat.png", "no URL"),
            ("https://example.org/cat.png", "link (https:)"),
            ("http://127.0.0.1:8000/health", "links are not followed"),
            ("file:///etc/passwd", "link (file:)"),
            ("data:image/png;base64", "without a comma"),
            ("data:,a", "type text/plain"),
            ("data:text/html;base64,AAEC", "type text/html"),
            ("data:imagé;base64,AAEC", "not image/"),
            ("data:image/png,AAEC", "is not base64"),
            ("data:image/png;base64;x=y,AAEC", "is not base64"),
            ("data:image/png;base64,AAE", "base64 of whole bytes"),
            ("data:image/png;base64,AAE!", "base64 of whole bytes"),
            ("data:image/png;base64,AA EC", "base64 of whole bytes"),
            ("data:image/png;base64,AAEC\n", "base64 of whole bytes"),
            ("data:image/png;base64,AA==AAEC", "base64 of whole bytes"),
            ("data:image/png;base64,AB==", "base64 of whole bytes"),
            ("data:image/png;base64,AA_-", "base64 of whole bytes"),
            ("data:image/png;base64,AAECAAECAAEC", "at most 3"),
        ] {
            let why = bytes(url, 3).unwrap_err();
            assert!(why.contains(words), "{url}: {why}");
        }
    }

    #[test]
    fn a_refusal_does_not_repeat_the_data() {
        let secret = "c2VjcmV0".repeat(1000);
        for url in
            [format!("data:image/png;base64,{secret}!"), format!("ftp://{secret}"), format!("{secret}:x")]
        {
            let why = bytes(&url, 1 << 20).unwrap_err();
            assert!(why.len() < 300, "{why}");
        }
    }
}
