//! The compiler and its cache: neither needs a device.

use std::fs;

use graph::cuda::code::{Code, Origin, cached_in, compile, version};
use graph::{Definition, Error, Kernel, Source};

use crate::rig::{Add, KERNELS, Misfit, WORDS};

pub(crate) const TESTS: &[(&str, fn())] = &[
    ("every_architecture_compiles", every_architecture_compiles),
    ("a_log_says_registers_and_spills", a_log_says_registers_and_spills),
    ("an_error_names_the_source_and_the_line", an_error_names_the_source_and_the_line),
    ("a_block_of_another_size_does_not_compile", a_block_of_another_size_does_not_compile),
    ("an_unknown_architecture_is_an_error", an_unknown_architecture_is_an_error),
    ("the_second_time_is_a_cache_hit", the_second_time_is_a_cache_hit),
    ("a_torn_entry_is_compiled_again", a_torn_entry_is_compiled_again),
    ("code_for_another_architecture_is_never_taken", code_for_another_architecture_is_never_taken),
    ("whatever_decides_the_code_decides_the_entry", whatever_decides_the_code_decides_the_entry),
    ("a_folder_that_takes_nothing_is_no_error", a_folder_that_takes_nothing_is_no_error),
];

pub(crate) const WITHOUT_COMPILER: &[(&str, fn())] =
    &[("a_machine_without_nvrtc_says_what_was_tried", a_machine_without_nvrtc_says_what_was_tried)];

fn every_architecture_compiles() {
    for architecture in ["sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a"] {
        let code = compile(&WORDS, architecture, &KERNELS).unwrap();
        assert_eq!(code.cubin[..4], *b"\x7fELF", "{architecture}");
        for kernel in KERNELS {
            let symbol = kernel.twin.unwrap().symbol;
            let found = code.cubin.windows(symbol.len()).any(|bytes| bytes == symbol.as_bytes());
            assert!(found, "{symbol} for {architecture}");
        }
    }
}

fn a_log_says_registers_and_spills() {
    let spills = Source {
        name: "spills.cu",
        text: "extern \"C\" __global__ __launch_bounds__(1024, 2) void spills(const float* from, float* to, int n) {
                   float x[64];
                   for (int i = 0; i < 64; i++) x[i] = from[i * threadIdx.x];
                   for (int k = 0; k < n; k++)
                       for (int i = 0; i < 64; i++) x[i] = x[i] * x[(i * 7 + 3) % 64] + 1;
                   float sum = 0;
                   for (int i = 0; i < 64; i++) sum += x[i];
                   to[threadIdx.x] = sum;
               }",
        includes: &[],
    };
    let found = compile(&spills, "sm_90a", &[]).unwrap().resources();
    assert_eq!((found.len(), found[0].symbol.as_str(), found[0].registers), (1, "spills", 32));
    assert!(found[0].spill_stores > 100 && found[0].spill_loads > 100, "{found:?}");
    let mut found = compile(&WORDS, "sm_90a", &KERNELS).unwrap().resources();
    found.sort_by(|a, b| a.symbol.cmp(&b.symbol));
    let symbols: Vec<&str> = found.iter().map(|kernel| kernel.symbol.as_str()).collect();
    assert_eq!(symbols, ["add", "echo", "hasty", "late", "look", "note", "spin", "turn"]);
    for kernel in found {
        assert!((1..=64).contains(&kernel.registers), "{kernel:?}");
        assert_eq!((kernel.spill_stores, kernel.spill_loads), (0, 0), "{kernel:?}");
    }
}

/// What a compile was refused with.
fn refused(source: &Source, architecture: &str, definitions: &[&Definition]) -> String {
    match compile(source, architecture, definitions) {
        Err(error @ Error::Code { .. }) => error.to_string(),
        other => panic!("{other:?}"),
    }
}

fn an_error_names_the_source_and_the_line() {
    let broken = Source {
        name: "broken.cu",
        text: "#include \"helper.cuh\"\n\nextern \"C\" __global__ void broken() { nowhere(); }\n",
        includes: &[("helper.cuh", "typedef int helper;\n")],
    };
    let text = refused(&broken, "sm_90a", &[]);
    assert!(text.starts_with("cannot compile for sm_90a `broken.cu`: "), "{text}");
    assert!(text.contains("broken.cu(3)") && text.contains("nowhere"), "{text}");
    let lost = Source { includes: &[], ..broken };
    let text = refused(&lost, "sm_90a", &[]);
    assert!(text.contains("helper.cuh"), "{text}");
}

fn a_block_of_another_size_does_not_compile() {
    let text = refused(&WORDS, "sm_90a", &[Misfit::DEFINITION]);
    assert!(text.contains("the block of `add`"), "{text}");
}

fn an_unknown_architecture_is_an_error() {
    let text = refused(&WORDS, "sm_12", &[]);
    assert!(text.contains("sm_12") && text.contains("words.cu"), "{text}");
}

fn the_second_time_is_a_cache_hit() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("made/on/demand");
    let first = cached_in(&folder, &WORDS, "sm_90a", &KERNELS).unwrap();
    let Origin::Compiler(path) = &first.from else { panic!("{:?}", first.from) };
    assert!(path.file_name().unwrap().to_str().unwrap().starts_with("words-sm_90a-"), "{path:?}");
    let second = cached_in(&folder, &WORDS, "sm_90a", &KERNELS).unwrap();
    assert_eq!(second, Code { from: Origin::Cache(path.clone()), ..first.clone() });
    assert_eq!(second.resources(), first.resources());
    assert_eq!(fs::read_dir(&folder).unwrap().count(), 1, "nothing half-made is left");
    let mut turned = KERNELS;
    turned.reverse();
    assert!(matches!(cached_in(&folder, &WORDS, "sm_90a", &turned).unwrap().from, Origin::Cache(_)));
}

fn a_torn_entry_is_compiled_again() {
    let folder = tempfile::tempdir().unwrap();
    let first = cached_in(folder.path(), &WORDS, "sm_80", &KERNELS).unwrap();
    let Origin::Compiler(path) = &first.from else { panic!("{:?}", first.from) };
    let whole = fs::read(path).unwrap();
    for torn in [&b""[..], &whole[..whole.len() / 2], b"something else"] {
        fs::write(path, torn).unwrap();
        let again = cached_in(folder.path(), &WORDS, "sm_80", &KERNELS).unwrap();
        assert_eq!((&again.from, &again.cubin), (&first.from, &first.cubin));
        let hit = cached_in(folder.path(), &WORDS, "sm_80", &KERNELS).unwrap();
        assert_eq!(hit.from, Origin::Cache(path.clone()), "it was replaced");
    }
}

fn code_for_another_architecture_is_never_taken() {
    let folder = tempfile::tempdir().unwrap();
    let entry = |architecture| {
        let code = cached_in(folder.path(), &WORDS, architecture, &KERNELS).unwrap();
        let (Origin::Compiler(path) | Origin::Cache(path)) = code.from.clone() else {
            panic!("{:?}", code.from)
        };
        (code, path)
    };
    let ((own, path), (other, elsewhere)) = (entry("sm_90a"), entry("sm_80"));
    assert!(path != elsewhere && own.cubin != other.cubin);
    // Whole, and of this very source: only its name says that it is another's.
    fs::copy(&elsewhere, &path).unwrap();
    let (again, _) = entry("sm_90a");
    assert!(matches!(again.from, Origin::Compiler(_)), "{:?}", again.from);
    assert!(again.cubin == own.cubin);
}

fn whatever_decides_the_code_decides_the_entry() {
    let folder = tempfile::tempdir().unwrap();
    let helper = |includes: &'static [(&'static str, &'static str)]| Source {
        name: "short.cu",
        text: "#include \"value.cuh\"\nextern \"C\" __global__ void set(int* to) { *to = VALUE; }",
        includes,
    };
    let (one, two) =
        (helper(&[("value.cuh", "#define VALUE 1")]), helper(&[("value.cuh", "#define VALUE 2")]));
    let renamed = Source { name: "other.cu", ..helper(one.includes) };
    let changed = Source { text: "extern \"C\" __global__ void set(int* to) {}", ..helper(one.includes) };
    let add: &[&Definition] = &[Add::DEFINITION];
    let cases: [(&Source, &str, &[&Definition]); 6] = [
        (&one, "sm_80", &[]),
        (&two, "sm_80", &[]),
        (&renamed, "sm_80", &[]),
        (&changed, "sm_80", &[]),
        (&one, "sm_90a", &[]),
        (&one, "sm_80", add),
    ];
    for (source, architecture, definitions) in cases {
        let code = cached_in(folder.path(), source, architecture, definitions).unwrap();
        assert!(matches!(code.from, Origin::Compiler(_)), "{:?}", code.from);
    }
    assert_eq!(fs::read_dir(folder.path()).unwrap().count(), cases.len());
}

fn a_folder_that_takes_nothing_is_no_error() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("a file");
    fs::write(&file, "not a folder").unwrap();
    let code = cached_in(&file, &WORDS, "sm_80", &KERNELS).unwrap();
    assert!(matches!(&code.from, Origin::Unkept(why) if why.contains("a file")), "{:?}", code.from);
    assert_eq!(fs::read(&file).unwrap(), b"not a folder");
}

fn a_machine_without_nvrtc_says_what_was_tried() {
    for error in [version().err(), compile(&WORDS, "sm_90a", &KERNELS).err()] {
        let error = error.expect("there is no NVRTC");
        let Error::Missing { what, why } = &error else { panic!("{error:?}") };
        assert!(what.contains("NVRTC"), "{what}");
        assert!(why.contains("libnvrtc.so") && why.contains("LD_LIBRARY_PATH"), "{why}");
        println!("{error}");
    }
}
