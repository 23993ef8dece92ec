//! Routes: what there is, what there is not, who may ask, and from where.

use serde_json::{Value, json};

use crate::client::{Ask, Response};
use crate::prompts::{CHAT, COMPLETIONS, chat, completion, with};
use crate::server::{Server, context, run, serve};

crate::tests! {
    models_name_the_model_that_is_served,
    an_unknown_model_is_404,
    unknown_routes_are_404_and_wrong_methods_405,
    a_body_that_is_not_json_is_415,
    tokens_go_to_text_and_back,
    tokens_of_a_chat_are_those_of_its_reply,
    a_key_is_needed_where_one_is_set,
    cors_is_off_unless_an_origin_is_given,
    ignorable_fields_are_named_in_a_header,
    health_tells_which_process_answers,
    refusals_say_what_was_wrong;
}

fn models_name_the_model_that_is_served() {
    let server = Server::start(&[]);
    let models = server.get("/v1/models").good();
    assert_eq!(models["object"], "list");
    let model = &models["data"][0];
    assert_eq!((&model["id"], &model["object"]), (&json!("tiny"), &json!("model")));
    assert_eq!(model["max_model_len"], context());
    assert!(model["created"].is_u64() && model["owned_by"].is_string());
    assert_eq!(models["data"].as_array().unwrap().len(), 1);

    let named = Server::start(&["--served-name", "house/of:round"]);
    assert_eq!(named.get("/v1/models").good()["data"][0]["id"], "house/of:round");
    let asked = |name: &str| named.post(CHAT, &with(chat("Hello!"), json!({"model": name})));
    assert_eq!(asked("house/of:round").good()["model"], "house/of:round");
    asked("tiny").error(404);
}

fn an_unknown_model_is_404() {
    let server = Server::start(&[]);
    for (path, body) in [(CHAT, chat("Hello!")), (COMPLETIONS, completion("Hello"))] {
        let error = server.post(path, &with(body, json!({"model": "no-such-model"}))).error(404);
        assert_eq!((&error["code"], &error["param"]), (&json!("model_not_found"), &json!("model")));
        assert!(error["message"].as_str().unwrap().contains("no-such-model"), "{error}");
    }
}

fn unknown_routes_are_404_and_wrong_methods_405() {
    let server = Server::start(&[]);
    let mut connection = server.connect();
    for path in [
        "/",
        "/v1",
        "/v1/chat",
        "/v1/chat/completions/",
        "/v1/embeddings",
        "/admin",
        "/v1//models",
        "/%00",
        "/..%2f",
    ] {
        connection.ask(&Ask::get(path)).error(404);
        connection.ask(&Ask::post(path, &json!({}))).error(404);
    }
    for (method, path, allow) in [
        ("GET", CHAT, "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", COMPLETIONS, "POST"),
        ("GET", "/tokenize", "POST"),
        ("GET", "/detokenize", "POST"),
        ("POST", "/v1/models", "GET"),
        ("POST", "/health", "GET"),
        ("DELETE", "/metrics", "GET"),
        ("POST", "/ready", "GET"),
    ] {
        let refused = connection.ask(&Ask::with(method, path).body(""));
        refused.error(405);
        assert!(refused.head.get("allow").is_some_and(|methods| methods.contains(allow)), "{method} {path}");
    }
    // The connection has outlived them all.
    connection.ask(&Ask::post(CHAT, &chat("Hello!"))).good();
}

fn a_body_that_is_not_json_is_415() {
    let server = Server::start(&[]);
    let body = chat("Hello!").to_string();
    let mut connection = server.connect();
    for kind in [
        "text/plain",
        "application/x-www-form-urlencoded",
        "multipart/form-data; boundary=x",
        "application/jsonx",
    ] {
        connection.ask(&Ask::raw(CHAT, body.clone()).header("content-type", kind)).error(415);
    }
    connection.ask(&Ask::with("POST", CHAT).body(body.clone())).error(415);
    for kind in ["application/json; charset=utf-8", "APPLICATION/JSON", "application/json;charset=UTF-8"] {
        connection.ask(&Ask::raw(CHAT, body.clone()).header("content-type", kind)).good();
    }
}

fn tokens_go_to_text_and_back() {
    let server = Server::start(&[]);
    for text in ["Spell garden backwards.", "🙂 漢字 é 🇩🇪", "", "  two  spaces\n\n", "<think>\n</think>"]
    {
        let tokens = server.post("/tokenize", &json!({"prompt": text})).good();
        let list = tokens["tokens"].as_array().unwrap();
        assert_eq!((&tokens["count"], &tokens["max_model_len"]), (&json!(list.len()), &json!(context())));
        assert_eq!(server.post("/detokenize", &json!({"tokens": list})).good(), json!({"prompt": text}));
    }
    let refused = |path: &str, body: Value, field: &str| server.post(path, &body).names(field);
    server.post("/tokenize", &json!({})).error(400);
    refused("/tokenize", json!({"prompt": 5}), "prompt");
    refused("/tokenize", json!({"prompt": "a", "extra": 1}), "extra");
    refused("/tokenize", json!({"messages": 5}), "messages");
    refused("/detokenize", json!({}), "tokens");
    refused("/detokenize", json!({"tokens": ["a"]}), "tokens");
    refused("/detokenize", json!({"tokens": [2048]}), "tokens");
    refused("/detokenize", json!({"tokens": [-1]}), "tokens");
    refused("/detokenize", json!({"tokens": [1], "text": ""}), "text");
    let both =
        server.post("/tokenize", &json!({"prompt": "a", "messages": [{"role": "user", "content": "a"}]}));
    both.error(400);
    let ignored = server.post("/tokenize", &json!({"prompt": "a", "add_special_tokens": true}));
    assert_eq!(ignored.head.get("x-roundhouse-ignored"), Some("add_special_tokens"));
}

fn tokens_of_a_chat_are_those_of_its_reply() {
    let server = Server::start(&[]);
    let body = chat("Spell garden backwards.");
    let tokens = server.post("/tokenize", &json!({"messages": body["messages"]})).good();
    let reply = server.post(CHAT, &body).good();
    assert_eq!(tokens["count"], reply["usage"]["prompt_tokens"]);
    let by_ids = json!({"model": "tiny", "prompt": tokens["tokens"], "temperature": 0});
    assert_eq!(
        server.post(COMPLETIONS, &by_ids).good()["choices"][0]["token_sha"],
        reply["choices"][0]["token_sha"]
    );
}

fn a_key_is_needed_where_one_is_set() {
    let server = Server::start(&["--api-key", "round key/7"]);
    let with_key = |ask: Ask, key: &str| server.ask(&ask.header("authorization", key));
    let locked = [
        Ask::post(CHAT, &chat("Hello!")),
        Ask::post(COMPLETIONS, &completion("Hello")),
        Ask::get("/v1/models"),
        Ask::post("/tokenize", &json!({"prompt": "a"})),
        Ask::post("/detokenize", &json!({"tokens": [1]})),
    ];
    for ask in locked {
        for refused in [
            server.ask(&ask),
            with_key(ask.clone(), "Bearer wrong"),
            with_key(ask.clone(), "Bearer round key/"),
            with_key(ask.clone(), "Bearer round key/77"),
            with_key(ask.clone(), "Basic round key/7"),
            with_key(ask.clone(), "round key/7"),
            with_key(ask.clone(), "Bearer"),
        ] {
            assert_eq!(refused.error(401)["type"], "authentication_error");
            assert_eq!(refused.head.get("www-authenticate"), Some("Bearer"));
            assert!(!refused.text().contains("round key"), "the key is in {}", refused.text());
        }
        assert_eq!(with_key(ask.clone(), "Bearer round key/7").status(), 200);
        assert_eq!(with_key(ask, "bearer round key/7").status(), 200, "the scheme has no case");
    }
    // A body is not looked at, and a route is not told, before the key is known.
    server.ask(&Ask::raw(CHAT, "{")).error(401);
    server.ask(&Ask::get("/v1/no-such-route")).error(401);
    for path in ["/health", "/ready", "/metrics"] {
        assert_eq!(server.get(path).status(), 200, "{path}");
    }
    assert!(!server.notes().text().contains("round key"), "{}", server.notes().text());
    assert!(!server.get("/health").text().contains("round key"));
    run(&mut serve(&["--api-key", ""])).failed(2, &["api-key"]);
}

fn cors_is_off_unless_an_origin_is_given() {
    fn allows(response: &Response) -> Option<&str> {
        response.head.get("access-control-allow-origin")
    }
    // Those of the official client for JavaScript.
    let asked_headers = ["authorization", "content-type", "x-stainless-lang", "x-stainless-retry-count"];
    let preflight = |origin: &str| {
        Ask::with("OPTIONS", CHAT)
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", &asked_headers.join(","))
    };
    let from = |origin: &str| Ask::post(CHAT, &chat("Hello!")).header("origin", origin);
    let off = Server::start(&[]);
    assert_eq!(allows(&off.ask(&from("http://a.example"))), None);
    assert_eq!(allows(&off.ask(&preflight("http://a.example"))), None);

    let on = Server::start(&[
        "--cors-origin",
        "http://a.example",
        "--cors-origin",
        "http://b.example:3000",
        "--api-key",
        "k",
    ]);
    for origin in ["http://a.example", "http://b.example:3000"] {
        let asked = on.ask(&preflight(origin));
        assert!([200, 204].contains(&asked.status()), "{}", asked.status());
        assert_eq!(allows(&asked), Some(origin));
        let headers = asked.head.get("access-control-allow-headers").unwrap_or_default().to_ascii_lowercase();
        asked_headers.iter().for_each(|name| assert!(headers.contains(name), "{name} is not in {headers}"));
        assert!(asked.head.get("access-control-allow-methods").unwrap_or_default().contains("POST"));
        let reply = on.ask(&from(origin).header("authorization", "Bearer k"));
        reply.good();
        assert_eq!(allows(&reply), Some(origin));
        // A page must be able to read why it was refused.
        assert_eq!(allows(&on.ask(&from(origin))), Some(origin));
    }
    assert_eq!(allows(&on.ask(&preflight("http://c.example"))), None);
    assert_eq!(allows(&on.ask(&from("http://a.example.evil").header("authorization", "Bearer k"))), None);
    let any = Server::start(&["--cors-origin", "*"]);
    assert_eq!(allows(&any.ask(&from("http://c.example"))), Some("*"));
}

fn ignorable_fields_are_named_in_a_header() {
    let server = Server::start(&[]);
    let ignorable = json!({
        "user": "me", "metadata": {"a": "b"}, "store": false, "service_tier": "auto", "parallel_tool_calls": true,
        "prompt_cache_key": "k", "safety_identifier": "s",
    });
    for (path, body) in [(CHAT, chat("Hello!")), (COMPLETIONS, completion("Hello"))] {
        let plain = server.post(path, &body);
        assert_eq!(plain.head.get("x-roundhouse-ignored"), None);
        let all = server.post(path, &with(body.clone(), ignorable.clone()));
        assert_eq!(all.good()["choices"], plain.good()["choices"]);
        let mut named: Vec<&str> =
            all.head.get("x-roundhouse-ignored").expect("a header").split(',').map(str::trim).collect();
        named.sort_unstable();
        let mut expected: Vec<&str> = ignorable.as_object().unwrap().keys().map(String::as_str).collect();
        expected.sort_unstable();
        assert_eq!(named, expected);
        let stream = server.begin(path, &with(body, json!({"user": "me"})));
        assert_eq!(stream.head.get("x-roundhouse-ignored"), Some("user"));
        // Proxies that hold answers back heed it.
        assert_eq!(stream.head.get("x-accel-buffering"), Some("no"));
        stream.whole().good();
    }
}

/// A restart cannot be taken for the process before it.
fn health_tells_which_process_answers() {
    let health = |server: &Server| server.get("/health").good();
    let (one, two, other) = (Server::start(&[]), Server::start(&[]), Server::start(&["--lanes", "2"]));
    let (first, second, third) = (health(&one), health(&two), health(&other));
    assert_eq!(first["status"], "ok");
    assert_eq!(first["version"], env!("CARGO_PKG_VERSION"));
    assert_eq!(first["pid"], one.pid());
    assert_eq!(second["pid"], two.pid());
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_secs();
    assert!((now - 120..=now).contains(&first["started"].as_u64().unwrap()), "{first}");
    assert!(first["config_hash"].as_str().unwrap().len() >= 8);
    assert_ne!(first["config_hash"], third["config_hash"]);
    assert_eq!(health(&one), first);
    let again = Server::start(&[]);
    assert_eq!(health(&again)["config_hash"], first["config_hash"]);
}

fn refusals_say_what_was_wrong() {
    let server = Server::start(&[]);
    let refused = |body: Value| server.post(CHAT, &body).error(400)["message"].as_str().unwrap().to_owned();
    for (more, words) in [
        (json!({"temperature": -1}), ["temperature", "-1"]),
        (json!({"top_p": 7.5}), ["top_p", "7.5"]),
        (json!({"reasoning_efort": "low"}), ["reasoning_efort", "field"]),
        (json!({"stop": ""}), ["stop", "empty"]),
        (json!({"n": 0}), ["n", "0"]),
        (json!({"n": 17}), ["17", "16"]),
    ] {
        let message = refused(with(chat("Hello!"), more));
        assert!(words.iter().all(|word| message.contains(word)), "{words:?} in {message:?}");
    }
}
