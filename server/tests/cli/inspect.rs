//! `inspect`: a model folder without its weights.

use crate::binary::{binary, run};
use crate::folder::{Folder, SHARD};

#[test]
fn a_folder_is_described() {
    let text = run(&mut binary("inspect")).good().stdout;
    for line in [
        "vocabulary   2048, boundary id 2014\n",
        "context      32768 positions\n",
        "layers       8: 6 gated delta net, 2 sparse attention\n",
        "stop ids     2016 2014\n",
        "tensors      474 in all, experts stored one by one\n",
        "not used: 31 tensors of the draft layer, 3.81 MiB\n",
        "  vision tower     2.28 MiB\n",
        "memory plan  400 MiB of the device, 256 MiB of the host\n",
        "  vision buffers     16.3 MiB  pictures of up to 16384 patches (--vision)\n",
        "  picture features   32.0 MiB  of pictures under way and seen before, at most (--vision)\n",
        "tokenizer  2040 tokens, 14 of them special, last id 2039\n",
        "chat_template.jinja\n",
    ] {
        assert!(text.contains(line), "{line:?} is not in:\n{text}");
    }
}

#[test]
fn nothing_is_run_and_no_weight_is_read() {
    let ended = run(&mut binary("inspect")).good();
    assert_eq!(ended.stderr, "");
    // Zeroed weights are as good as any here: only headers count.
    let zeroed = Folder::new().with_bytes(SHARD, |bytes| {
        let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        bytes[data..].fill(0);
    });
    let inspected = run(&mut crate::binary::on("inspect", zeroed.path())).good().stdout;
    let until_path = |text: &str| text.split("\nchat ").next().unwrap().to_string();
    assert_eq!(until_path(&inspected), until_path(&ended.stdout));
}
