// On a mesh of one rank a program does what it does without one: the same bits, the same text, the same files.
#include "tests/support/dispatch_support.hpp"
#include "tests/support/stderr_support.hpp"

#include <ATen/Parallel.h>

#include <cstring>
#include <sstream>

namespace dt = dtensor;
using namespace dtensor::test;

namespace {

// What a program leaves: text, and the bytes of tensors.
struct Log {
  std::ostringstream text;

  void bytes(const void* data, size_t count) { text.write(static_cast<const char*>(data), static_cast<std::streamsize>(count)); }
  void tensor(const at::Tensor& t) {
    const auto full = dt::full_tensor(t).contiguous();
    dt::NoSpmd plain;
    text << full.sizes() << full.scalar_type() << t.strides() << t.storage_offset();
    bytes(full.data_ptr(), full.nbytes());
  }
};

struct Snippet {
  const char* name;
  void (*run)(Log&);
};

struct Square : torch::autograd::Function<Square> {  // by pointer, forward and backward
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    auto y = torch::empty_like(x);
    for (int64_t i = 0; i < x.numel(); ++i) y.data_ptr<float>()[i] = x.data_ptr<float>()[i] * x.data_ptr<float>()[i];
    return y;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list gradients) {
    const auto x = context->get_saved_variables()[0];
    auto result = torch::empty_like(x);
    for (int64_t i = 0; i < x.numel(); ++i) {
      result.data_ptr<float>()[i] = 2 * x.data_ptr<float>()[i] * gradients[0].data_ptr<float>()[i];
    }
    return {result};
  }
};

struct NetImpl : torch::nn::Cloneable<NetImpl> {
  NetImpl() { reset(); }
  void reset() override {
    first = register_module("first", torch::nn::Linear(4, 8));
    norm = register_module("norm", torch::nn::BatchNorm1d(8));
    second = register_module("second", torch::nn::Linear(8, 2));
  }
  at::Tensor forward(at::Tensor x) { return second(torch::relu(norm(first(x)))); }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
};
TORCH_MODULE(Net);

torch::nn::Sequential small_net() {
  torch::manual_seed(3);
  return torch::nn::Sequential(torch::nn::Linear(3, 4), torch::nn::BatchNorm1d(4), torch::nn::Linear(4, 2));
}

struct Pairs : torch::data::datasets::Dataset<Pairs> {
  torch::data::Example<> get(size_t index) override {
    auto data = torch::empty({3});
    for (int i = 0; i < 3; ++i) data.data_ptr<float>()[i] = static_cast<float>(index * 3 + i);
    return {data, torch::tensor(static_cast<int64_t>(index % 2))};
  }
  torch::optional<size_t> size() const override { return 10; }
};

const Snippet kSnippets[] = {
    {"data_ptr reads and writes",
     [](Log& log) {
       auto x = torch::arange(6, torch::kFloat).reshape({2, 3});
       x.data_ptr<float>()[4] = 7.5F;
       static_cast<float*>(x.data_ptr())[1] += 0.25F;
       log.bytes(x.data_ptr<float>(), x.nbytes());
       log.tensor(x * 2);
     }},
    {"data_ptr of views",
     [](Log& log) {
       auto x = torch::arange(24, torch::kFloat).reshape({4, 6});
       const auto row = x[2], column = x.select(1, 3), piece = x.slice(0, 1, 3).slice(1, 2, 5), turned = x.t();
       for (const auto& view : {row, column, piece, turned}) {
         log.text << view.strides() << view.storage_offset() << ' ' << view.data_ptr<float>() - x.data_ptr<float>() << ' ';
         log.text << *view.data_ptr<float>() << ' ' << view.is_alias_of(x);
         *view.data_ptr<float>() = -1;
       }
       log.tensor(x);
     }},
    {"accessor",
     [](Log& log) {
       auto x = torch::zeros({3, 4}, torch::kDouble).t();
       auto a = x.accessor<double, 2>();
       for (int64_t i = 0; i < a.size(0); ++i) {
         for (int64_t j = 0; j < a.size(1); ++j) a[i][j] = static_cast<double>(10 * i + j);
       }
       log.tensor(x);
       log.tensor(x.sum(0));
       auto p = x.packed_accessor64<double, 2>();
       log.text << p[3][2];
     }},
    {"torch::tensor, from_blob",
     [](Log& log) {
       const std::vector<float> numbers{1, 2.5F, -3};
       log.tensor(torch::tensor(numbers));
       log.tensor(torch::tensor({{1, 2}, {3, 4}}));
       log.tensor(torch::tensor(numbers, torch::kDouble) * torch::tensor(2.0, torch::kDouble));
       std::vector<int64_t> own{5, 6, 7, 8};
       auto shared = torch::from_blob(own.data(), {2, 2}, torch::kLong);
       shared += 1;
       log.tensor(shared.clone() * 2);
       log.text << own << shared.is_alias_of(shared.view({4}));
     }},
    {"constants of a region in plain code",  // as transforms of a data set have them, in the threads of a loader
     [](Log& log) {
       const auto mean = torch::full({1}, 0.5F);
       at::Tensor plain;
       {
         dt::NoSpmd no_spmd;
         plain = torch::ones({2, 3}).sub(mean).div_(mean);
       }
       log.tensor(plain);
       log.tensor(plain.add(mean));
     }},
    {"printing",
     [](Log& log) {
       torch::manual_seed(1);
       log.text << torch::tensor(2.5) << torch::arange(5) << torch::randn({3, 4})
                << torch::randn({2, 2, 3}, torch::kDouble).transpose_(0, 2).mul(1e6) << torch::zeros({0}) << torch::ones({2, 30})
                << torch::tensor({true, false}) << torch::empty({3, 0});
       log.text << torch::randn({2}).requires_grad_() << at::Tensor() << torch::full({2}, INFINITY);
     }},
    {"printing what is computed on",
     [](Log& log) {
       auto x = torch::ones({2, 2}).requires_grad_();
       auto loss = (x * 3).sum();
       log.text << loss << '\n';
       loss.backward();
       log.text << x.grad() << x.sizes() << x.options() << x.dtype() << x.toString();
     }},
    {"storage",
     [](Log& log) {
       auto x = torch::arange(10, torch::kShort), y = x.slice(0, 2, 6), z = x.clone();
       log.text << x.storage().nbytes() << y.storage().nbytes() << y.storage_offset() << x.has_storage();
       log.text << x.is_alias_of(y) << x.is_alias_of(z) << (x.storage().data() == y.storage().data());
       log.text << x.detach().is_alias_of(x) << x.view({2, 5}).is_alias_of(x) << x.to(torch::kShort).is_alias_of(x);
     }},
    {"saved tensors",
     [](Log& log) {
       auto x = torch::arange(6, torch::kFloat).reshape({2, 3});
       for (const auto& t : {x, x.t(), x[1], torch::tensor(4)}) {
         std::ostringstream out;
         torch::save(t, out);
         log.text << out.str();
       }
       std::ostringstream out;
       torch::save(std::vector<at::Tensor>{x, x[0]}, out);
       log.text << out.str();
     }},
    {"loaded tensors",
     [](Log& log) {
       std::stringstream file, list;
       torch::save(torch::arange(6, torch::kFloat).reshape({2, 3}).t(), file);
       torch::save(std::vector<at::Tensor>{torch::ones({2}), torch::tensor(4)}, list);
       at::Tensor x;
       torch::load(x, file);
       log.tensor(x);
       log.tensor(x.matmul(torch::ones({2, 2})));
       x.add_(1);
       log.text << x;
       std::vector<at::Tensor> several;
       torch::load(several, list);
       log.tensor(several.at(0) + several.at(1));
     }},
    {"saved and loaded modules",
     [](Log& log) {
       auto net = small_net();
       std::stringstream file;
       torch::save(net, file);
       log.text << file.str();
       auto other = small_net();
       torch::nn::init::zeros_(other->at<torch::nn::LinearImpl>(0).weight);
       torch::load(other, file);
       for (const auto& p : other->parameters()) log.tensor(p), log.text << p.requires_grad() << p.is_leaf();
       for (const auto& b : other->buffers()) log.tensor(b);
       other->forward(torch::ones({2, 3})).sum().backward();
       for (const auto& p : other->parameters()) log.tensor(p.grad());
     }},
    {"saved and loaded optimizers",
     [](Log& log) {
       auto net = small_net();
       torch::optim::Adam optimizer(net->parameters(), 1e-2), again(net->parameters(), 1e-2);
       net->forward(torch::ones({2, 3})).sum().backward();
       optimizer.step();
       std::stringstream file;
       torch::save(optimizer, file);  // whose keys are addresses, of as many digits as they happen to have
       torch::load(again, file);
       again.step();
       for (const auto& p : net->parameters()) log.tensor(p);
     }},
    {"modules cloned",
     [](Log& log) {
       torch::manual_seed(2);
       Net net;
       auto copy = std::dynamic_pointer_cast<NetImpl>(net->clone());
       for (const auto& p : copy->parameters()) log.tensor(p), log.text << p.is_alias_of(net->parameters()[0]);
       copy->to(torch::kDouble);
       log.tensor(copy->forward(torch::ones({2, 4}, torch::kDouble)));
       log.tensor(net->forward(torch::ones({2, 4})));
     }},
    {"a function of one's own, by pointer",
     [](Log& log) {
       auto x = torch::arange(6, torch::kFloat).reshape({2, 3}).requires_grad_();
       auto y = Square::apply(x);
       (y.sum() + (y * y).sum()).backward();
       log.tensor(y);
       log.tensor(x.grad());
     }},
    {"set_data and set_",
     [](Log& log) {
       auto x = torch::zeros({2, 2}), y = torch::arange(4, torch::kFloat).reshape({2, 2});
       x.data_ptr<float>()[0] = 1;
       x.set_data(y);
       log.text << x.is_alias_of(y) << *x.data_ptr<float>();
       x.data_ptr<float>()[3] = 8;
       log.tensor(y);
       auto z = torch::empty({0});
       z.set_(y);
       log.text << z.is_alias_of(y) << z.sizes();
       log.tensor(z);
       z.set_(y.storage(), 1, {3}, {1});
       log.tensor(z);
       log.tensor(z + 1);
     }},
    {"resize_",
     [](Log& log) {
       auto x = torch::arange(6, torch::kFloat);
       x.resize_({2, 3});
       log.tensor(x);
       x.resize_({4});
       log.tensor(x * 2);
       auto out = torch::empty({0});
       torch::add_out(out, torch::ones({2, 2}), torch::ones({2, 2}));
       log.tensor(out);
     }},
    {"loaders",
     [](Log& log) {
       torch::manual_seed(7);
       auto loader = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
           Pairs().map(torch::data::transforms::Normalize<>(1.0, 2.0)).map(torch::data::transforms::Stack<>()), 4);
       for (auto& batch : *loader) log.tensor(batch.data), log.tensor(batch.target);
     }},
    {"several threads at one tensor",
     [](Log& log) {
       const auto x = torch::arange(1000, torch::kDouble);
       std::atomic<int64_t> sum = 0;
       std::vector<std::thread> threads;
       for (int t = 0; t < 4; ++t) {
         threads.emplace_back([&, t] {
           for (int64_t i = t; i < 1000; i += 4) sum += static_cast<int64_t>(x.data_ptr<double>()[i]);
         });
       }
       for (auto& thread : threads) thread.join();
       log.text << sum;
     }},
    {"memory after writes by operators",
     [](Log& log) {
       auto x = torch::zeros({4});
       auto* memory = x.data_ptr<float>();
       x += 1;
       x[2] = 5;
       log.text << memory[0] << memory[2] << (x.data_ptr<float>() == memory);
       x.copy_(torch::arange(4));
       memory[3] = 9;
       log.tensor(x);
     }},
    {"tensors without elements, of numbers and in other orders",
     [](Log& log) {
       auto none = torch::empty({0, 3});
       log.text << (none.data_ptr<float>() == nullptr) << none.has_storage();
       auto images = torch::arange(48, torch::kFloat).reshape({2, 3, 2, 4}).contiguous(at::MemoryFormat::ChannelsLast);
       log.bytes(images.data_ptr(), images.nbytes());
       auto mapped = torch::nn::functional::relu(images - 3);
       log.bytes(mapped.data_ptr(), mapped.nbytes());
       auto wide = torch::ones({1, 3}).expand({4, 3});
       log.text << wide.data_ptr<float>()[2] << wide.strides();
       auto turned = torch::arange(6, torch::kFloat).reshape({2, 3}).t() + 1;
       log.bytes(turned.data_ptr(), turned.nbytes());
     }},
};

std::string plain_log(const Snippet& snippet) {
  Log log;
  snippet.run(log);
  return log.text.str();
}

}  // namespace

TEST_CASE("identity: on one rank memory text and files are those of a plain program", "[identity]") {
  for (const auto& snippet : kSnippets) {
    std::string plain, on_mesh;
    on_ranks(1, [&](dt::World&) { plain = plain_log(snippet); });
    INFO(snippet.name);
    try {
      on_ranks(1, [&](dt::World& world) {
        const auto mesh = line(world);
        dt::Spmd spmd(mesh);
        on_mesh = plain_log(snippet);
      });
    } catch (const std::exception& error) {
      on_mesh = error.what();
    }
    CHECK(on_mesh == plain);
  }
}

TEST_CASE("one rank is not told what operators without a rule do", "[identity]") {
  const auto sparse = [](dt::World& world) {
    const auto mesh = line(world);
    dt::distribute_tensor(torch::ones({4}), mesh, {dt::replicate()}).tensor().to_sparse();
  };
  CHECK(stderr_of([&] { on_ranks(1, sparse); }).empty());
  CHECK_THAT(stderr_of([&] { on_ranks(2, sparse); }), says("has no sharding rule and runs on replicated operands"));
}
