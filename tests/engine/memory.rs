//! Where the n-gram tables live, and plans that do not fit: what is told before any weight is read.

use std::fs;
use std::path::Path;

use kernels::numerics::ElementType;
use runtime::checkpoint::layout::Wanted;
use runtime::engine::{Class, EngineOptions, Place, memory_plan, open};
use runtime::error::Error;
use runtime::open::{Load, Opened, Progress};
use runtime::probe::{Logits, LogitsOptions, LogitsRequest, logits};
use runtime::weights::TablePlace;
use tests::fixture::repository;
use tests::luck::tables_leave_the_same_everywhere;

const BASE: &str = "tests/oracle/checkpoints/base_bf16";

#[test]
fn tables_leave_the_same_bytes_wherever_they_live() {
    let models = [
        ("models/tiny", ElementType::Bf16, 2000),
        (BASE, ElementType::Bf16, 1009),
        ("tests/oracle/checkpoints/base_fp32", ElementType::F32, 300),
        ("tests/oracle/checkpoints/two_ple", ElementType::Bf16, 300),
        ("tests/oracle/checkpoints/quant_fp8_block", ElementType::Bf16, 300),
        ("tests/oracle/checkpoints/quant_nvfp4", ElementType::Bf16, 300),
    ];
    tables_leave_the_same_everywhere(Place::Host, &models);
}

/// What a folder is refused with whose tables are to be mapped.
fn refused(dir: &Path, element: ElementType) -> String {
    match Opened::new(dir, Place::Host.form(element, TablePlace::Mapped)) {
        Err(Error::Setting(why)) => why,
        Err(other) => panic!("{other}"),
        Ok(_) => panic!("{} should be refused", dir.display()),
    }
}

#[test]
fn a_table_of_another_type_is_not_mapped() {
    let says = refused(&repository(BASE), ElementType::F32);
    for word in ["--table mmap", "shard_0.weight", "BF16", "f32", "--table device"] {
        assert!(says.contains(word), "{word:?} is not in: {says}");
    }
}

#[test]
fn a_table_at_an_odd_byte_is_not_mapped() {
    let folder = tempfile::tempdir().expect("a folder");
    for item in fs::read_dir(repository(BASE)).expect("the checkpoint") {
        let item = item.expect("a file");
        fs::copy(item.path(), folder.path().join(item.file_name())).expect("copied");
    }
    // A header that is one space longer shifts everything behind it by a byte.
    let path = folder.path().join("model.safetensors");
    let bytes = fs::read(&path).expect("weights");
    let (length, rest) = bytes.split_first_chunk::<8>().expect("a length");
    let length = u64::from_le_bytes(*length);
    let (header, data) = rest.split_at(length as usize);
    fs::write(&path, [&(length + 1).to_le_bytes()[..], header, b" ", data].concat()).expect("written");
    let says = refused(folder.path(), ElementType::Bf16);
    for word in ["--table mmap", "shard_0.weight", "begins at byte", "bf16", "--table pinned"] {
        assert!(says.contains(word), "{word:?} is not in: {says}");
    }
    let other = Opened::new(folder.path(), Place::Host.form(ElementType::Bf16, TablePlace::Pinned));
    assert!(other.is_ok(), "a copy may begin anywhere");
}

fn options() -> EngineOptions {
    EngineOptions {
        classes: vec![Class { context: 512, lanes: 40, pages: 100 }],
        slab_lanes: 8,
        ..EngineOptions::default()
    }
}

#[test]
fn the_plan_counts_all_that_may_come_and_says_where_it_lives() {
    let plan = |options: &EngineOptions| {
        let opened = Opened::new(&repository(BASE), Place::Host.form(options.element, options.table))
            .expect("a model");
        memory_plan(&opened, options).expect("a plan")
    };
    let text = plan(&options()).to_string();
    for words in [
        "40 of ",
        "32 of them made when they are needed (--lanes)",
        "100 of ",
        "bf16, in device memory (--table)",
        "recorded rounds, at most (--graphs)",
        "staging rings",
    ] {
        assert!(text.contains(words), "{words:?} is not in: {text}");
    }
    let bytes = |options: &EngineOptions| plan(options).bytes();
    let all = bytes(&options());
    for (table, words) in [(TablePlace::Pinned, "in pinned host memory"), (TablePlace::Mapped, "mapped from")]
    {
        let moved = EngineOptions { table, ..options() };
        assert!(bytes(&moved) < all, "{table}");
        assert!(plan(&moved).to_string().contains(words), "{table}");
    }
    // On a GPU graphs are device memory too; planning needs none.
    let cuda = EngineOptions { place: Place::Cuda(0), ..options() };
    assert_eq!(bytes(&cuda), all + options().graph_bytes);
    assert_eq!(bytes(&EngineOptions { graphs: false, ..cuda }), all);
}

#[test]
fn weights_on_their_way_into_tiles_are_planned() {
    let plan = |form, load| {
        let opened = Opened::with(&repository(BASE), form, load).expect("a model");
        let plan = memory_plan(&opened, &options()).expect("a plan").to_string();
        (opened.staging_bytes(), plan)
    };
    let form = |place: Place| place.form(ElementType::Bf16, TablePlace::Device);
    let words = "a batch at a time, only while weights are read";
    let (bytes, text) = plan(form(Place::Cuda(0)), Load::default());
    assert!(bytes > 0 && text.contains(words) && text.contains("read buffers"), "{text}");
    let dummy = Load::Dummy { layers: None, seed: 1, stored: Wanted::default() };
    for (form, load) in [(form(Place::Host), Load::default()), (form(Place::Cuda(0)), dummy)] {
        let (bytes, text) = plan(form, load);
        assert!(bytes == 0 && !text.contains(words) && !text.contains("read buffers"), "{text}");
    }
}

/// Opens with so much memory; what it is refused with, and whether a weight was read.
fn with_memory(host_memory: usize) -> Result<(), String> {
    let mut read = false;
    let opened = open(&repository(BASE), &EngineOptions { host_memory, ..options() }, &mut |progress| {
        read |= matches!(progress, Progress::Loading { .. });
    });
    match opened {
        Ok(_) => Ok(()),
        Err(Error::Setting(why)) if !read => Err(why),
        Err(other) => panic!("{other}, weights read: {read}"),
    }
}

#[test]
fn a_plan_that_does_not_fit_is_refused_before_a_weight_is_read() {
    let form = options().form(&repository(BASE)).expect("a folder");
    let opened = Opened::new(&repository(BASE), form).expect("a model");
    let needed = memory_plan(&opened, &options()).expect("a plan").bytes();
    with_memory(needed).expect("it just fits");
    let says = with_memory(needed - 1).expect_err("one byte is short");
    let last = "picture features";
    for words in [&format!("needs {needed} bytes"), &format!("{} (", needed - 1), "1 short", last] {
        assert!(says.contains(words), "{words:?} is not in: {says}");
    }
    let says = with_memory(4096).expect_err("nothing fits");
    for words in ["weights of ", "--vision off", "--lanes", "--memory", "--context", "--table pinned"] {
        assert!(says.contains(words), "{words:?} is not in: {says}");
    }
}

/// The logits of a few ids; or what they are refused with, and whether a weight was read.
fn some_logits(options: &LogitsOptions) -> Result<Logits, String> {
    let request =
        LogitsRequest { ids: (10..90).collect(), decode_from: Some(70), ..LogitsRequest::default() };
    let (mut read, mut plans) = (false, 0);
    let logits = logits(&repository(BASE), options, &request, &mut |progress| {
        read |= matches!(progress, Progress::Loading { .. });
        plans += usize::from(matches!(progress, Progress::Plan(_)));
    });
    assert_eq!(plans, 1, "the plan is told");
    match logits {
        Ok(logits) => Ok(logits),
        Err(Error::Setting(why)) if !read => Err(why),
        Err(other) => panic!("{other}, weights read: {read}"),
    }
}

#[test]
fn logits_are_the_same_wherever_tables_live_and_are_planned_too() {
    let expected = some_logits(&LogitsOptions::default()).expect("it fits").data;
    for table in [TablePlace::Pinned, TablePlace::Mapped] {
        let logits = some_logits(&LogitsOptions { table, ..LogitsOptions::default() }).expect("it fits");
        assert!(logits.data == expected, "{table}");
    }
    let says = some_logits(&LogitsOptions { host_memory: 4096, ..LogitsOptions::default() });
    let says = says.map(|logits| logits.positions).expect_err("nothing fits");
    for words in ["does not fit the device", "weights of ", "--table pinned"] {
        assert!(says.contains(words), "{words:?} is not in: {says}");
    }
}
