//! N-gram tables in every format: wherever they live, and by the rows that are looked up.

use std::os::unix::fs::FileExt;
use std::path::Path;

use graph::host::HostOptions;
use graph::{Device, Digest, Digester, Ptr};
use kernels::numerics::ElementType;
use kernels::quant::{fp8, nvfp4};
use kernels::weight::GROUP;
use runtime::checkpoint::Checkpoint;
use runtime::checkpoint::layout::Format;
use runtime::convert::ConvertOptions;
use runtime::probe::{LogitsOptions, LogitsRequest, logits};
use runtime::weights::{TablePlace, WeightForm, WeightPlan};

use super::{Converted, TABLES, oracle};

fn with_table(format: Format) -> Converted {
    let options = ConvertOptions { table: Some(format), ..ConvertOptions::default() };
    Converted::new(&oracle("base_bf16"), &options)
}

#[test]
fn a_table_of_any_format_lives_anywhere() {
    let request =
        LogitsRequest { ids: (10..90).collect(), decode_from: Some(70), ..LogitsRequest::default() };
    for format in TABLES {
        let converted = with_table(format);
        let run = |table| {
            let options = LogitsOptions { table, ..LogitsOptions::default() };
            logits(&converted.path(), &options, &request, &mut |_| {}).expect("it runs").data
        };
        let device = run(TablePlace::Device);
        for table in [TablePlace::Pinned, TablePlace::Mapped] {
            assert!(run(table) == device, "{format} {table}");
        }
    }
}

/// A checksum of rows that are looked up, as numbers: the first ones of each shard.
fn looked_up(dir: &Path) -> Digest {
    const ROWS: usize = 20;
    let checkpoint = Checkpoint::open(dir).expect("it opens");
    let device = Device::host(HostOptions::default());
    let form = WeightForm::new(ElementType::F32, kernels::weight::Order::of(&device));
    let plan = WeightPlan::new(&checkpoint, form).expect("it is laid out");
    let loaded = plan.load(&checkpoint, &device, &mut |_, _| {}).expect("it loads");
    let memory = &loaded.memory.arena;
    let mut digest = Digester::new();
    for (layer, weights) in checkpoint.layout.layers.iter().zip(&loaded.weights.layers) {
        let (Some(ple), Some(ngram)) = (&layer.ple, &weights.ngram) else { continue };
        let width = ple.shards[0].shape[1];
        let shards = memory.read(ngram.shards.cast::<Ptr<u8>>(), ple.shards.len()).expect("addresses");
        let scales = ngram.scales.expect("nvfp4 has scales").cast::<Ptr<u8>>();
        let scales = memory.read(scales, ple.shards.len()).expect("addresses");
        for (codes, scales) in shards.into_iter().zip(scales) {
            let codes: Vec<u8> = memory.read(codes, ROWS * width / 2).expect("rows");
            let scales: Vec<u8> = memory.read(scales, ROWS * width / GROUP).expect("scales");
            for number in 0..ROWS * width {
                let code = nvfp4::decode(codes[number / 2] >> (number % 2 * 4));
                digest.number((code * fp8::decode(scales[number / GROUP]) * ngram.global).to_bits().into());
            }
        }
    }
    digest.finish()
}

/// Nothing in a file says which half of a byte is the even column; the rows do.
#[test]
fn swapped_nibbles_change_the_checksum_of_looked_up_rows() {
    let converted = with_table(Format::Nvfp4);
    let before = looked_up(&converted.path());
    assert_eq!(before, looked_up(&converted.path()));
    let checkpoint = Checkpoint::open(&converted.path()).expect("it opens");
    let ple = checkpoint.layout.layers.iter().find_map(|layer| layer.ple.as_ref()).expect("a table");
    let swap = |shard: usize| {
        let entry = checkpoint.expect(&ple.shards[shard]);
        let file = std::fs::OpenOptions::new().read(true).write(true).open(checkpoint.path(entry));
        let file = file.expect("a file");
        let mut codes = vec![0; entry.bytes() as usize];
        file.read_exact_at(&mut codes, entry.range.start).expect("codes");
        codes.iter_mut().for_each(|code| *code = code.rotate_left(4));
        file.write_all_at(&codes, entry.range.start).expect("swapped");
    };
    // One shard of the table is enough.
    for shard in 0..ple.shards.len() {
        swap(shard);
        assert_ne!(before, looked_up(&converted.path()), "shard {shard}");
        swap(shard);
    }
    assert_eq!(before, looked_up(&converted.path()));
}
